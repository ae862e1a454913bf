"""Weights of models: where they come from, in which format, and in which form they are wanted."""

from __future__ import annotations

from ranvier.memory.opened import FileChanged
from ranvier.weights.access import Access, NotCached, Unreachable
from ranvier.weights.cache import WeightCache
from ranvier.weights.formats.base import Checkpoint, Format, Opening
from ranvier.weights.formats.registry import register_format
from ranvier.weights.formats.safetensors import save as save_safetensors
from ranvier.weights.http import Contradiction, Missing, Page
from ranvier.weights.loader import Metadata, WeightLoader
from ranvier.weights.progress import Bars, Progress
from ranvier.weights.sources.base import Context, Source
from ranvier.weights.sources.hub import HubSource
from ranvier.weights.sources.local import FileSource, MemorySource
from ranvier.weights.sources.registry import source_of
from ranvier.weights.sources.s3 import S3Source
from ranvier.weights.sources.web import UrlSource
from ranvier.weights.stored import TensorInfo, Weight
from ranvier.weights.transforms import Cast, Quantize, Reshape, Scale, Slice, Transform, Transpose, apply

__all__ = [
    "Access",
    "Bars",
    "Cast",
    "Checkpoint",
    "Context",
    "Contradiction",
    "FileChanged",
    "FileSource",
    "Format",
    "HubSource",
    "MemorySource",
    "Metadata",
    "Missing",
    "NotCached",
    "Opening",
    "Page",
    "Progress",
    "Quantize",
    "Reshape",
    "S3Source",
    "Scale",
    "Slice",
    "Source",
    "TensorInfo",
    "Transform",
    "Transpose",
    "Unreachable",
    "UrlSource",
    "Weight",
    "WeightCache",
    "WeightLoader",
    "apply",
    "register_format",
    "save_safetensors",
    "source_of",
]
