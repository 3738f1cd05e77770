"""What one run of the demo asks of its processes; travels to each of them as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model. ``vocabulary`` is the 256 bytes and one begin-of-text token."""

    layers: int = 8
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    mlp: int = 1408
    vocabulary: int = 257
    rope_base: float = 10000.0


@dataclass(frozen=True)
class Job:
    """One request: the prompt, how many tokens to generate, and on what."""

    model: ModelConfig
    tokens: list[int]
    generate: int
    block_tokens: int
    seed: int
    threads: int
    timeout_s: float
    omitted_layer: int | None = None
    transport: str | None = None
    listen: str | None = None
    secret: str | None = None
    request: str = "req-0"

    def tag(self, layer: int) -> bytes:
        """The notify tag that says: this request's KV of ``layer`` is there."""
        return f"{self.request}/{layer}".encode()

    @property
    def has_two_hosts(self) -> bool:
        """Whether decode may run on another host, with another clock."""
        return self.listen is not None

    @property
    def transports(self) -> list[str] | None:
        """What to give to ``kvzc.Engine(transports=...)``."""
        return None if self.transport is None else [self.transport]

    @property
    def prompt_blocks(self) -> int:
        """Blocks that hold the prompt; the last may be part empty."""
        return -(-len(self.tokens) // self.block_tokens)

    @property
    def all_blocks(self) -> int:
        """Blocks that hold the prompt and what is generated."""
        return -(-(len(self.tokens) + self.generate) // self.block_tokens)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's float32 keys and values in the prompt's blocks."""
        model = self.model
        return 2 * self.prompt_blocks * self.block_tokens * model.kv_heads * model.head_dim * 4

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Job:
        return Job(**{**fields, "model": ModelConfig(**fields["model"])})
