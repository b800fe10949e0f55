import deepspeed
import torch


def main(args, net, dataset):
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=dataset
    )
    fp16 = model_engine.fp16_enabled()
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(2):
        for i, (inputs, labels) in enumerate(trainloader):
            if fp16:
                inputs = inputs.half()
            outputs = model_engine(inputs.to(model_engine.local_rank))
            loss = criterion(outputs, labels.to(model_engine.local_rank))
            model_engine.backward(loss)
            model_engine.step()
            if i % args.log_interval == 0:
                print(epoch, i, loss.item())
    model_engine.save_checkpoint("out")
