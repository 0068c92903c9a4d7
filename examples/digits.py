"""Train a small Flax network on scikit-learn's handwritten digits with Keras' verbs, on eight simulated devices.

Command:   python examples/digits.py (needs scikit-learn: pip install scikit-learn, or dew[test])
Expected:  the validation accuracy passes 95 % (about 97 %) on any mesh, in under 20 seconds on 2 CPU cores.
           On accelerators, delete the two lines below.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dew_keras  # first: it chooses Keras' JAX backend

# isort: split
import keras
from flax import linen as nn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class Classifier(nn.Module):
    """Two hidden layers with dropout; any Flax module works, and `training` is told to those that ask."""

    @nn.compact
    def __call__(self, x, training=False):
        """Score the ten digits.

        Args:
            x: Pixels [rows, 64], from 0 to 1.
            training: Whether dropout acts.
        """
        for width in (128, 64):
            x = nn.relu(nn.Dense(width)(x))
            x = nn.Dropout(0.2, deterministic=not training)(x)
        return nn.Dense(10)(x)


def main(mesh=None, epochs=15):
    """Train and return the accuracy on digits that were not trained on.

    Args:
        mesh: As `compile` takes it; None is all devices on data.
        epochs: Passes over the training digits.
    """
    pixels, labels = load_digits(return_X_y=True)
    x, x_held_out, y, y_held_out = train_test_split(pixels / 16, labels, test_size=0.2, random_state=0)

    model = dew_keras.Model(Classifier(), seed=0)
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        mesh=mesh,
    )
    # 1,437 rows are no multiple of the batch or of the devices: the last batch is filled up, and fillers do not count.
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=2, validation_data=(x_held_out, y_held_out))

    wrong = (model.predict(x_held_out, verbose=0).argmax(axis=-1) != y_held_out).sum()
    scores = model.evaluate(x_held_out, y_held_out, verbose=0, return_dict=True)
    print(f"validation accuracy {scores['accuracy']:.3f}: {wrong} of {len(y_held_out)} digits wrong")
    return scores["accuracy"]


if __name__ == "__main__":
    main()
