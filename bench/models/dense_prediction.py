"""Networks that answer with a picture or with boxes: a YOLO-style detector at 640 and a U-Net at 256."""

from __future__ import annotations

import numpy as np

from bench.models.blocks import GAIN, Net

CLASSES, BINS = 80, 16


def yolo_640() -> Net:
    """A small anchor-free detector: CSP blocks with SiLU, pooling pyramid, two-way feature pyramid, box bins."""
    net = Net("yolo_640", opset=17)

    def unit(x: str, inside: int, outside: int, kernel: int = 1, stride: int = 1) -> str:
        return net.silu(net.conv(x, inside, outside, kernel, stride=stride, gain=GAIN["silu"]))

    def csp(x: str, inside: int, outside: int, repeats: int, *, residual: bool) -> str:
        half = outside // 2
        a, b = net.nodes("Split", unit(x, inside, outside), net.ints(half, half), results=2, axis=1)
        parts = [a, b]
        for _ in range(repeats):
            y = unit(unit(parts[-1], half, half, 3), half, half, 3)
            parts.append(net.add(parts[-1], y) if residual else y)
        return unit(net.node("Concat", *parts, axis=1), half * len(parts), outside)

    x = net.input("images", [1, 3, 640, 640])
    with net.scope("backbone"):
        x = unit(unit(x, 3, 16, 3, 2), 16, 32, 3, 2)
        x = unit(csp(x, 32, 32, 1, residual=True), 32, 64, 3, 2)
        fine = csp(x, 64, 64, 2, residual=True)
        middle = csp(unit(fine, 64, 128, 3, 2), 128, 128, 2, residual=True)
        x = csp(unit(middle, 128, 256, 3, 2), 256, 256, 1, residual=True)
        pools = [unit(x, 256, 128)]
        for _ in range(3):
            pools.append(net.max_pool(pools[-1], 5, stride=1, pad=2))
        coarse = unit(net.node("Concat", *pools, axis=1), 512, 256)
    with net.scope("neck"):
        up = csp(net.node("Concat", net.upsample(coarse), middle, axis=1), 384, 128, 1, residual=False)
        small = csp(net.node("Concat", net.upsample(up), fine, axis=1), 192, 64, 1, residual=False)
        down = net.node("Concat", unit(small, 64, 64, 3, 2), up, axis=1)
        medium = csp(down, 192, 128, 1, residual=False)
        down = net.node("Concat", unit(medium, 128, 128, 3, 2), coarse, axis=1)
        large = csp(down, 384, 256, 1, residual=False)
    boxes, classes = [], []
    for level, (feature, width) in enumerate([(small, 64), (medium, 128), (large, 256)]):
        with net.scope(f"head.{level}"):
            box = unit(unit(feature, width, 64, 3), 64, 64, 3)
            boxes.append(net.reshape(net.conv(box, 64, 4 * BINS), 1, 4 * BINS, -1))
            kind = unit(unit(feature, width, CLASSES, 3), CLASSES, CLASSES, 3)
            classes.append(net.reshape(net.conv(kind, CLASSES, CLASSES), 1, CLASSES, -1))
    with net.scope("decode"):
        result = _decoded(net, net.node("Concat", *boxes, axis=2), net.node("Concat", *classes, axis=2))
    net.output(result, "output0", [1, 4 + CLASSES, _anchors()[0].shape[1]])
    return net


def _anchors() -> tuple[np.ndarray, np.ndarray]:
    """Centres of the cells of the three grids, and the strides of their grids."""
    centres, strides = [], []
    for stride in (8, 16, 32):
        side = np.arange(640 // stride, dtype=np.float32) + 0.5
        rows, columns = np.meshgrid(side, side, indexing="ij")
        centres.append(np.stack([columns.ravel(), rows.ravel()]))
        strides.append(np.full((1, side.size**2), stride, np.float32))
    return np.concatenate(centres, axis=1), np.concatenate(strides, axis=1)


def _decoded(net: Net, boxes: str, classes: str) -> str:
    """Distances from distributions over bins, boxes from distances, beside the scores of the classes."""
    centres, strides = _anchors()
    count = centres.shape[1]
    bins = net.transpose(net.reshape(boxes, 1, 4, BINS, count), 0, 2, 1, 3)
    weights = net.weight(np.arange(BINS, dtype=np.float32).reshape(1, BINS, 1, 1))
    mean = net.node("Conv", net.node("Softmax", bins, axis=1), weights, kernel_shape=[1, 1])
    distances = net.reshape(mean, 1, 4, count)
    before = net.slice(distances, net.ints(0), net.ints(2), 1)
    after = net.slice(distances, net.ints(2), net.ints(4), 1)
    anchors = net.weight(centres[None])
    low, high = net.node("Sub", anchors, before), net.add(anchors, after)
    centre = net.node("Div", net.add(low, high), net.constant(2.0))
    box = net.node("Concat", centre, net.node("Sub", high, low), axis=1)
    return net.node("Concat", net.mul(box, net.weight(strides[None])), net.node("Sigmoid", classes), axis=1)


def unet_256() -> Net:
    """Four levels of 32 to 512 channels at 256, transposed convolutions on the way up."""
    net = Net("unet_256", opset=13)

    def double(x: str, inside: int, outside: int) -> str:
        y = net.node("Relu", net.conv(x, inside, outside, 3, gain=GAIN["relu"]))
        return net.node("Relu", net.conv(y, outside, outside, 3, gain=GAIN["relu"]))

    x = net.input("image", ["batch", 3, 256, 256])
    widths = [32, 64, 128, 256]
    skips: list[str] = []
    inside = 3
    for level, width in enumerate(widths):
        with net.scope(f"encoder{level + 1}"):
            skips.append(double(x, inside, width))
            x = net.max_pool(skips[-1], 2, stride=2)
            inside = width
    with net.scope("bottleneck"):
        x = double(x, 256, 512)
    for level, width in reversed(list(enumerate(widths))):
        with net.scope(f"decoder{level + 1}"):
            w = net.normal(2 * width, width, 2, 2, scale=1 / np.sqrt(2 * width))
            up = net.node("ConvTranspose", x, w, net.around(0.0, width), kernel_shape=[2, 2], strides=[2, 2])
            x = double(net.node("Concat", up, skips[level], axis=1), 2 * width, width)
    net.output(net.node("Sigmoid", net.conv(x, 32, 1)), "mask", ["batch", 1, 256, 256])
    return net
