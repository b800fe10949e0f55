# source: the two-step optimizer of a vocoder in Coqui TTS, re-expressed: the losses share no graph
import copy

from voices import Speaker, SpeakerConfig


def test_both_steps_move_the_parameters(batch, criterion):
    config = SpeakerConfig(optimizer_params={"SGD": {"lr": 1e-5}})
    model = Speaker(config)
    optimizer = model.get_optimizer()
    former = copy.deepcopy(model)
    for _ in range(5):
        _, loss_dict = model.train_step(batch, criterion)
        optimizer.zero_grad()
        loss_dict["prior_loss"].backward()
        optimizer.first_step()
        loss_dict["loss"].backward()
        optimizer.step()
    for param, old in zip(model.parameters(), former.parameters()):
        assert (param != old).any(), "a parameter stands still"
