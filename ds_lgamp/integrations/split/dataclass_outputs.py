"""Outputs that are dataclasses, in which torch finds no tensors by itself."""

from dataclasses import fields, is_dataclass
from typing import Any

from torch.utils._pytree import register_pytree_node, tree_leaves


def register_dataclasses(output: Any) -> None:
    """Lets torch's trees find what dataclasses in ``output`` hold, in all objects of these classes."""
    for leaf in tree_leaves(output):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            _register(type(leaf))
            register_dataclasses(leaf)


def _register(cls: Any) -> None:
    names = [field.name for field in fields(cls)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def unflatten(values: Any, _: None) -> Any:
        # Not by its __init__, which may compute.
        made = object.__new__(cls)
        for name, value in zip(names, values):
            object.__setattr__(made, name, value)
        return made

    register_pytree_node(cls, flatten, unflatten)
