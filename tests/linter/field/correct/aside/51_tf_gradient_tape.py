# style of: tensorflow/docs:site/en/guide/mixed_precision.ipynb
# torch: none (tensorflow 2.4 to 2.15)
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers, mixed_precision

mixed_precision.set_global_policy("mixed_float16")

inputs = keras.Input(shape=(784,), name="digits")
x = layers.Dense(512, activation="relu")(inputs)
x = layers.Dense(512, activation="relu")(x)
x = layers.Dense(10)(x)
# the softmax is kept in float32
outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
model = keras.Model(inputs=inputs, outputs=outputs)

optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.RMSprop())
loss_object = keras.losses.SparseCategoricalCrossentropy()

(x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
x_train = x_train.reshape(60000, 784).astype("float32") / 255
x_test = x_test.reshape(10000, 784).astype("float32") / 255
train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000).batch(8192)
test_dataset = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(8192)


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
    return loss, norm


@tf.function
def test_step(x):
    return model(x, training=False)


for epoch in range(5):
    epoch_loss_avg = tf.keras.metrics.Mean()
    test_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    for x, y in train_dataset:
        loss, norm = train_step(x, y)
        epoch_loss_avg(loss)
    for x, y in test_dataset:
        test_accuracy.update_state(y, test_step(x))
    print(f"Epoch {epoch}: loss={epoch_loss_avg.result():.4f} test={test_accuracy.result():.4f}")
    print("scale", optimizer.loss_scale.numpy())
