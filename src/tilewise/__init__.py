"""Exact attention for PyTorch, computed tile by tile."""

from . import flops as _flops  # noqa: F401  registers the formulas
from . import mods
from .api import flash_attn_combine, flash_attn_func, flash_attn_varlen_func
from .errors import DoubleBackwardError, UnsupportedError
from .kvcache import flash_attn_with_kvcache
from .mods.block_mask import BlockSparseTensors, create_block_sparse
from .sdpa import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "BlockSparseTensors",
    "DoubleBackwardError",
    "UnsupportedError",
    "create_block_sparse",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "mods",
    "scaled_dot_product_attention",
]
