# style of: google/flax:examples/imagenet/train.py
# torch: none (jax)
import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state


class Attention(nn.Module):
    width: int
    dtype: jnp.dtype = jnp.float16

    @nn.compact
    def __call__(self, x, mask):
        q = nn.Dense(self.width, dtype=self.dtype)(x)
        k = nn.Dense(self.width, dtype=self.dtype)(x)
        v = nn.Dense(self.width, dtype=self.dtype)(x)
        scores = jnp.einsum("btd,bsd->bts", q, k).astype(jnp.float32) / self.width**0.5
        scores = jnp.where(mask[:, None, :], scores, -1e9)
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores).astype(self.dtype), v)


class Classifier(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x, mask):
        h = Attention(128)(x, mask).mean(axis=1)
        return nn.Dense(self.classes, dtype=jnp.float32)(h)


class TrainState(train_state.TrainState):
    dynamic_scale: dynamic_scale_lib.DynamicScale


def create_state(rng, sample, half_precision=True):
    model = Classifier(10)
    params = model.init(rng, *sample)["params"]
    scale = dynamic_scale_lib.DynamicScale() if half_precision else None
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx, dynamic_scale=scale)


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"], batch["mask"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    dynamic_scale = state.dynamic_scale
    if dynamic_scale:
        # scales the loss, unscales the gradients, and adjusts itself
        dynamic_scale, is_fin, loss, grads = dynamic_scale.value_and_grad(loss_fn)(state.params)
    else:
        loss, grads = jax.value_and_grad(loss_fn)(state.params)

    new_state = state.apply_gradients(grads=grads)
    if dynamic_scale:
        # keep the old parameters and moments where the gradients overflowed
        pick = functools.partial(jnp.where, is_fin)
        new_state = new_state.replace(
            params=jax.tree_util.tree_map(pick, new_state.params, state.params),
            opt_state=jax.tree_util.tree_map(pick, new_state.opt_state, state.opt_state),
            dynamic_scale=dynamic_scale,
        )
    return new_state, loss
