"""Train the demo model that ships with Ranvier: a small convolutional network that reads handwritten digits.

The network is trained from scratch in plain NumPy on the 1797 8×8 digits that scikit-learn brings along (E. Alpaydin
and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0). Every fifth
digit is held out: training never sees it, though it does see other digits by the same writers. Two files result:
`digits.onnx`, and `digits_samples.npz` with 16 of the held-out digits. The same seed gives the same model on the same
machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn import datasets
from threadpoolctl import threadpool_limits

Array = np.ndarray
MODELS = Path(__file__).resolve().parent.parent / "src" / "ranvier" / "models"
CLASSES = [str(digit) for digit in range(10)]
SIDE = 8
OPSET = 17


# -- data --------------------------------------------------------------------------------------------------------------


def load_digits() -> tuple[Array, Array, Array, Array]:
    """Training images and labels, held-out images and labels; images are float32 [n, 1, 8, 8] in 0..1."""
    digits = datasets.load_digits()
    images = (digits.images / 16).astype(np.float32)[:, np.newaxis]
    labels = digits.target.astype(np.int64)
    held_out = np.arange(len(labels)) % 5 == 4
    return images[~held_out], labels[~held_out], images[held_out], labels[held_out]


def batches(count: int, size: int, rng: np.random.Generator) -> Iterator[Array]:
    """All positions once, in random order, in batches."""
    order = rng.permutation(count)
    for start in range(0, count, size):
        yield order[start : start + size]


def shifted(images: Array, rng: np.random.Generator) -> Array:
    """Every image moved by up to one pixel in each direction: the same digit, written elsewhere."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    down, right = rng.integers(0, 3, (2, len(images)))
    rows = down[:, np.newaxis] + np.arange(SIDE)
    columns = right[:, np.newaxis] + np.arange(SIDE)
    return padded[np.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]][:, np.newaxis]


# -- layers: each forward returns what its backward needs --------------------------------------------------------------


def patches(x: Array) -> Array:
    """The 3×3 neighbourhood of every pixel, zero-padded: [n, channels * 9, h * w]."""
    n, channels, height, width = x.shape
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    seen = np.empty((n, channels, 9, height, width), x.dtype)
    for k in range(9):
        down, right = divmod(k, 3)
        seen[:, :, k] = padded[:, :, down : down + height, right : right + width]
    return seen.reshape(n, channels * 9, height * width)


def conv(x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    """A 3×3 convolution that keeps the size, and the patches it saw."""
    seen = patches(x)
    y = weight.reshape(len(weight), -1) @ seen + bias[:, np.newaxis]
    return y.reshape(len(x), len(weight), *x.shape[2:]), seen


def conv_backward(seen: Array, weight: Array, dy: Array) -> tuple[Array, Array]:
    """Gradients of the weight and the bias."""
    flat = dy.reshape(len(dy), len(weight), -1)
    d_weight = (flat @ seen.transpose(0, 2, 1)).sum(axis=0)
    return d_weight.reshape(weight.shape), flat.sum(axis=(0, 2))


def conv_backward_input(weight: Array, dy: Array) -> Array:
    """Gradient of the input: a convolution too, with the kernel turned around and its channels exchanged."""
    turned = weight[:, :, ::-1, ::-1].transpose(1, 0, 2, 3)
    return conv(dy, turned, np.zeros(len(turned), dy.dtype))[0]


def max_pool(x: Array) -> tuple[Array, Array]:
    """The maximum of every 2×2 block, and where it stood in the block."""
    n, channels, height, width = x.shape
    blocks = x.reshape(n, channels, height // 2, 2, width // 2, 2).transpose(0, 1, 2, 4, 3, 5)
    blocks = blocks.reshape(n, channels, height // 2, width // 2, 4)
    winner = blocks.argmax(axis=-1)[..., np.newaxis]
    return np.take_along_axis(blocks, winner, -1)[..., 0], winner


def max_pool_backward(winner: Array, dy: Array) -> Array:
    n, channels, height, width = dy.shape
    blocks = np.zeros((n, channels, height, width, 4), dy.dtype)
    np.put_along_axis(blocks, winner, dy[..., np.newaxis], -1)
    blocks = blocks.reshape(n, channels, height, width, 2, 2).transpose(0, 1, 2, 4, 3, 5)
    return blocks.reshape(n, channels, 2 * height, 2 * width)


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


# -- the network -------------------------------------------------------------------------------------------------------


class DigitNet:
    """Conv 3×3 – Relu – Conv 3×3 – Relu – MaxPool – Flatten – Gemm – Relu – Gemm – Softmax."""

    def __init__(self, rng: np.random.Generator, channels: tuple[int, int] = (16, 32), hidden: int = 64) -> None:
        first, second = channels
        pixels = second * (SIDE // 2) ** 2
        shapes = {
            "conv1": (first, 1, 3, 3),
            "conv2": (second, first, 3, 3),
            "dense1": (hidden, pixels),
            "dense2": (len(CLASSES), hidden),
        }
        self.weights: dict[str, Array] = {}
        for name, shape in shapes.items():
            fan_in = int(np.prod(shape[1:]))
            self.weights[f"{name}.weight"] = rng.normal(0, np.sqrt(2 / fan_in), shape).astype(np.float32)
            self.weights[f"{name}.bias"] = np.zeros(shape[0], np.float32)

    def probabilities(self, images: Array) -> Array:
        return softmax(self._forward(images)[0])

    def gradients(self, images: Array, labels: Array, smoothing: float) -> tuple[float, dict[str, Array]]:
        """The mean cross-entropy, and its gradient by every weight."""
        scores, (seen1, a1, seen2, a2, winner, flat, hidden) = self._forward(images)
        probabilities = softmax(scores)
        target = np.full_like(scores, smoothing / len(CLASSES))
        target[np.arange(len(labels)), labels] += 1 - smoothing
        loss = -float((target * np.log(probabilities + 1e-12)).sum(axis=1).mean())

        w = self.weights
        d: dict[str, Array] = {}
        d_scores = (probabilities - target) / np.float32(len(labels))
        d["dense2.weight"], d["dense2.bias"] = d_scores.T @ hidden, d_scores.sum(axis=0)
        d_hidden = (d_scores @ w["dense2.weight"]) * (hidden > 0)
        d["dense1.weight"], d["dense1.bias"] = d_hidden.T @ flat, d_hidden.sum(axis=0)
        d_pooled = (d_hidden @ w["dense1.weight"]).reshape(len(images), -1, SIDE // 2, SIDE // 2)
        d_a2 = max_pool_backward(winner, d_pooled) * (a2 > 0)
        d["conv2.weight"], d["conv2.bias"] = conv_backward(seen2, w["conv2.weight"], d_a2)
        d_a1 = conv_backward_input(w["conv2.weight"], d_a2) * (a1 > 0)
        d["conv1.weight"], d["conv1.bias"] = conv_backward(seen1, w["conv1.weight"], d_a1)
        return loss, d

    def _forward(self, images: Array) -> tuple[Array, tuple[Array, ...]]:
        w = self.weights
        y1, seen1 = conv(images, w["conv1.weight"], w["conv1.bias"])
        a1 = np.maximum(y1, 0)
        y2, seen2 = conv(a1, w["conv2.weight"], w["conv2.bias"])
        a2 = np.maximum(y2, 0)
        pooled, winner = max_pool(a2)
        flat = pooled.reshape(len(images), -1)
        hidden = np.maximum(flat @ w["dense1.weight"].T + w["dense1.bias"], 0)
        scores = hidden @ w["dense2.weight"].T + w["dense2.bias"]
        return scores, (seen1, a1, seen2, a2, winner, flat, hidden)


class Adam:
    """Adam with decoupled weight decay."""

    def __init__(self, weights: dict[str, Array], decay: float) -> None:
        self.weights = weights
        self.decay = decay
        self.mean = {name: np.zeros_like(w) for name, w in weights.items()}
        self.square = {name: np.zeros_like(w) for name, w in weights.items()}
        self.steps = 0

    def step(self, gradients: dict[str, Array], rate: float) -> None:
        self.steps += 1
        correction = np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for name, g in gradients.items():
            mean, square, weight = self.mean[name], self.square[name], self.weights[name]
            mean += np.float32(0.1) * (g - mean)
            square += np.float32(0.001) * (g * g - square)
            if weight.ndim > 1:
                weight *= np.float32(1 - rate * self.decay)
            weight -= np.float32(rate * correction) * mean / (np.sqrt(square) + np.float32(1e-8))


# -- the model file ----------------------------------------------------------------------------------------------------


def to_onnx(net: DigitNet, metadata: dict[str, str]) -> onnx.ModelProto:
    keep_size = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1"], "conv1", **keep_size),
        node("Relu", ["conv1"], ["relu1"], "relu1"),
        node("Conv", ["relu1", "conv2.weight", "conv2.bias"], ["conv2"], "conv2", **keep_size),
        node("Relu", ["conv2"], ["relu2"], "relu2"),
        node("MaxPool", ["relu2"], ["pooled"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["pooled"], ["flat"], "flatten"),
        node("Gemm", ["flat", "dense1.weight", "dense1.bias"], ["dense1"], "dense1", transB=1),
        node("Relu", ["dense1"], ["relu3"], "relu3"),
        node("Gemm", ["relu3", "dense2.weight", "dense2.bias"], ["scores"], "dense2", transB=1),
        node("Softmax", ["scores"], ["probabilities"], "softmax", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, SIDE, SIDE])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", len(CLASSES)])],
        [numpy_helper.from_array(weight, name) for name, weight in net.weights.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=8,
        producer_name="ranvier tools/train_digits.py",
        doc_string="Reads one handwritten digit of 8 by 8 pixels, each from 0 (paper) to 1 (ink).",
    )
    helper.set_model_props(model, metadata)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_model(path: Path, images: Array) -> tuple[str, Array]:
    """The exported model's answers, computed by ONNX Runtime or, where that is missing, by the standard's reference."""
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        return "onnx.reference", ReferenceEvaluator(str(path)).run(None, {"image": images})[0]
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return f"onnxruntime {onnxruntime.__version__}", session.run(None, {"image": images})[0]


def sample_positions(labels: Array, count: int = 16) -> Array:
    """The first held-out digit of every class, then the next ones in order."""
    firsts = [int(np.flatnonzero(labels == k)[0]) for k in range(len(CLASSES))]
    others = [k for k in range(len(labels)) if k not in firsts]
    return np.array(firsts + others[: count - len(firsts)])


def accuracy(probabilities: Array, labels: Array) -> float:
    return float((probabilities.argmax(axis=1) == labels).mean())


# -- the command -------------------------------------------------------------------------------------------------------


@click.command(help=__doc__, context_settings={"show_default": True, "max_content_width": 100})
@click.option("--epochs", default=60, type=click.IntRange(min=1), help="Passes over the training digits.")
@click.option("--batch-size", default=64, type=click.IntRange(min=1), help="Digits per step.")
@click.option("--learning-rate", default=2e-3, type=click.FloatRange(min=0, min_open=True), help="Of the first step.")
@click.option("--weight-decay", default=1e-2, type=click.FloatRange(min=0), help="Pull of the weights towards zero.")
@click.option(
    "--smoothing", default=0.05, type=click.FloatRange(0, 1), help="Share of a label spread over all classes."
)
@click.option("--seed", default=2024, help="Of the first weights, the order of the digits and their shifts.")
@click.option(
    "--out",
    default=MODELS,
    type=click.Path(file_okay=False, path_type=Path),
    show_default="src/ranvier/models",
    help="Folder for both files.",
)
def main(
    epochs: int, batch_size: int, learning_rate: float, weight_decay: float, smoothing: float, seed: int, out: Path
) -> None:
    console = Console()
    rng = np.random.default_rng(seed)
    train_images, train_labels, test_images, test_labels = load_digits()
    net = DigitNet(rng)
    optimizer = Adam(net.weights, weight_decay)
    steps = epochs * -(-len(train_labels) // batch_size)
    started = time.perf_counter()
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    # one BLAS thread: the products are small, and sums then come in one order, so that runs repeat
    with threadpool_limits(1), Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=epochs, loss=float("nan"))
        for _ in range(epochs):
            losses = []
            for chosen in batches(len(train_labels), batch_size, rng):
                rate = learning_rate * 0.5 * (1 + np.cos(np.pi * optimizer.steps / steps))
                images = shifted(train_images[chosen], rng)
                loss, gradients = net.gradients(images, train_labels[chosen], smoothing)
                optimizer.step(gradients, rate)
                losses.append(loss)
            progress.update(task, advance=1, loss=float(np.mean(losses)))
    seconds = time.perf_counter() - started

    train_accuracy = accuracy(net.probabilities(train_images), train_labels)
    test_accuracy = accuracy(net.probabilities(test_images), test_labels)
    metadata = {
        "license": "Apache-2.0",
        "class_names": ",".join(CLASSES),
        "train_accuracy": f"{train_accuracy:.4f}",
        "test_accuracy": f"{test_accuracy:.4f}",
        "train_images": str(len(train_labels)),
        "test_images": str(len(test_labels)),
        "dataset": "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI (CC BY 4.0)",
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "digits.onnx"
    path.write_bytes(to_onnx(net, metadata).SerializeToString(deterministic=True))
    positions = sample_positions(test_labels)
    samples = out / "digits_samples.npz"
    np.savez_compressed(samples, images=test_images[positions], labels=test_labels[positions])

    runtime, probabilities = run_model(path, test_images)
    difference = float(np.abs(probabilities - net.probabilities(test_images)).max())
    console.print(f"trained {epochs} epochs of {len(train_labels)} digits in {seconds:.1f} s")
    console.print(f"accuracy: {train_accuracy:.2%} on the training digits, {test_accuracy:.2%} on the held-out ones")
    console.print(
        f"exported: {accuracy(probabilities, test_labels):.2%} on the {len(test_labels)} held-out digits by {runtime}, "
        f"at most {difference:.1e} away from the trained network"
    )
    console.print(f"wrote {path} ({path.stat().st_size / 1000:.0f} kB) and {samples} ({len(positions)} digits)")


if __name__ == "__main__":
    main()
