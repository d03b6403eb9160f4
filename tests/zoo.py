"""RotationZoo files for the tests: good ones, and the parts of which wrong ones are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

DIM, HEADS = 16, 2


def rotations(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random rotations ``[*shape, DIM, DIM]``, orthogonal to float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*shape, DIM, DIM, generator=generator, dtype=torch.float64))[0].float()


def stretched(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix that is no rotation, and what version 3 stores beside it: its inverse, transposed."""
    scale = torch.linspace(0.5, 2.0, DIM, dtype=torch.float64)
    into = (rotations(*shape, seed=seed).double() * scale).float()
    return into, torch.linalg.inv(into.double()).mT.float()


def state(entries: dict[Any, dict[str, Any]], version: int = 1, **changes: Any) -> dict[str, Any]:
    return {"format_version": version, "objective": "test", "source_grouping": "layer", "layers": entries, **changes}


def layer(index: int, rotation: torch.Tensor, **fields: Any) -> dict[str, Any]:
    return {"layer_id": index, "rotation": rotation, **fields}


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def value_file(folder: Path, *ids: int) -> Path:
    return write(folder / "v.pt", state({i: layer(i, rotations(seed=10 + i)) for i in ids or (0,)}))


def good_pair(folder: Path) -> tuple[Path, Path]:
    """A good version 1 pair of two layers."""
    k = {i: layer(i, rotations(seed=i), eigenvalues=torch.arange(DIM) + 0.1) for i in (0, 1)}
    v = {i: layer(i, rotations(seed=10 + i)) for i in (0, 1)}
    return (
        write(folder / "k.pt", state(k, objective="qqt_r_h_pbr")),
        write(folder / "v.pt", state(v, objective="sst_r_h_pbr")),
    )
