"""Several layers as one that does the same to whatever lies below; pure, and touches no file contents."""

from __future__ import annotations

from collections.abc import Sequence

from rollmill.sandbox.snapshots.layers import Layer, Node, normal, parent
from rollmill.sandbox.snapshots.tar import Kind


def merge(layers: Sequence[Layer]) -> Layer:
    """One layer for `layers`, bottom to top. Removals stay in it, for it may come to lie on others."""
    if not layers:
        raise ValueError("no layers to merge; an empty state is an empty layer")
    whole = layers[0]
    for upper in layers[1:]:
        whole = _over(upper, whole)
    return whole


def _over(upper: Layer, lower: Layer) -> Layer:
    nodes: dict[bytes, Node | None] = {}
    opaque = set(upper.opaque)
    for path, node in lower.nodes.items():
        if not _is_hidden(path, upper):
            nodes[path] = node
            if path in lower.opaque:
                opaque.add(path)
    for path, node in upper.nodes.items():
        is_folder = node is not None and node.kind is Kind.FOLDER
        if is_folder and path in lower.nodes and not _is_folder(path, lower) and path in nodes:
            # Lower said "removed" or "a file": what lies below both must stay hidden behind the new folder.
            opaque.add(path)
        nodes[path] = node
    return normal(nodes, opaque)


def _is_hidden(path: bytes, upper: Layer) -> bool:
    """Whether a folder on the way to `path` is gone, replaced or opaque in `upper`."""
    folder = parent(path)
    while folder is not None:
        if folder in upper.opaque or (folder in upper.nodes and not _is_folder(folder, upper)):
            return True
        folder = parent(folder)
    return False


def _is_folder(path: bytes, layer: Layer) -> bool:
    node = layer.nodes.get(path)
    return node is not None and node.kind is Kind.FOLDER
