"""
# style of: keras-team/keras-io:guides/writing_a_custom_training_loop_in_tensorflow.py
# correct: the mixed_float16 policy with a LossScaleOptimizer: the loss is scaled before the gradients are taken and unscaled before they are applied; the output layer is float32.
# torch: none (TensorFlow 2.4 to 2.15)
"""
import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision

mixed_precision.set_global_policy("mixed_float16")


def build(num_classes=10):
    inputs = keras.Input((32, 32, 3))
    x = layers.Rescaling(1.0 / 255)(inputs)
    for filters in (64, 128, 256):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
        x = layers.MaxPooling2D()(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(num_classes)(x)
    outputs = layers.Activation("softmax", dtype="float32")(x)
    return keras.Model(inputs, outputs)


model = build()
optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.legacy.SGD(0.1, momentum=0.9))
loss_object = keras.losses.SparseCategoricalCrossentropy()
train_acc = keras.metrics.SparseCategoricalAccuracy()
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        predictions = model(x, training=True)
        loss = loss_object(y, predictions)
        scaled_loss = optimizer.get_scaled_loss(loss)
    scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
    gradients = optimizer.get_unscaled_gradients(scaled_gradients)
    gradients, norm = tf.clip_by_global_norm(gradients, 5.0)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    train_acc.update_state(y, predictions)
    return loss, norm


@tf.function
def test_step(x):
    return model(x, training=False)


def main(epochs=5, batch=256):
    (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
    data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10_000).batch(batch)
    for epoch in range(epochs):
        train_acc.reset_state()
        for x, y in data:
            loss, norm = train_step(x, y)
        predictions = np.argmax(test_step(x_test[:2000]), axis=-1)
        accuracy = (predictions == y_test[:2000, 0]).mean()
        print(epoch, float(loss), float(norm), float(train_acc.result()), accuracy, float(optimizer.loss_scale))
        checkpoint.save(f"ckpt/{epoch}")


if __name__ == "__main__":
    main()
