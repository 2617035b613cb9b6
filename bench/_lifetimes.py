"""The tensors of a compiled step, in the order torch.compile's code for a card takes them and gives them back.

Read off the code Inductor generates (docs/formulas.md); a slow test of tests/plan/test_replay.py has it generated anew and
compares. Sizes: `n` tokens, `c` channels, `v` entries of the vocabulary; matrices come in 16 bits and leave
gradients in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from _allocator import CachingAllocator, Piece

from gptfit.plan.setting import Setting

CUBLAS_WORKSPACE = 8_519_680  # :4096:2:16:8, taken from the same allocator
FEWEST_MICRO_STEPS = 2  # the second finds gradients, or a held tensor, where the first had room


@dataclass(frozen=True)
class Held:
    """The peak of what lives, and what the allocator holds for it."""

    allocated: int
    reserved: int


@dataclass
class CompiledStep:
    """Replays micro-steps and updates of one setting of GPT-2's block with whole logits, in 16 bits under autocast."""

    setting: Setting
    memory: CachingAllocator
    returned: Piece | None = None  # logits of the micro-step before, which the loop's variable still names
    gradients: list[Piece] = field(default_factory=list)
    state: list[Piece] = field(default_factory=list)
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        shape = self.setting.shape
        self.tensor = self.setting.micro_tokens * shape.n_embd  # numbers of one tensor of the residual stream
        self.square = shape.n_embd**2  # numbers of a matrix from the stream to the stream
        self.table = shape.vocab_size * shape.n_embd
        self.logits = self.setting.micro_tokens * shape.vocab_size
        self.sums = 4 * self.setting.micro_tokens * shape.n_head  # bytes; attention's, one per token and head
        self.is_tied = shape.is_tied
        self.is_modern = (
            shape.arch == "modern"
        )  # normalised and turned queries and keys, and a copy of attention's result
        self.memory.take(CUBLAS_WORKSPACE)
        for weight in shape.weights():
            self.memory.take(4 * weight.size)

    def micro_step(self) -> None:
        take, drop, x = self.memory.take, self.memory.give_back, self.tensor
        embedded = take(4 * x)
        blocks = [self._forward() for _ in range(self.setting.shape.n_layer)]
        norm, head_copy, logits = take(2 * x), take(2 * self.table), take(2 * self.logits)
        gradient = self._gradient_of(logits)
        head, small = take(2 * self.table), take(2 * x)
        drop(gradient, head_copy, norm)
        new = []
        if not self.is_tied:
            new.append(take(4 * self.table))
            drop(head)
        stream = take(4 * x)
        new += [piece for block in reversed(blocks) for piece in self._backward(block)]
        embedding = take(4 * self.table)
        drop(small, stream, embedded)
        if self.is_tied:  # the head's and the embedding's gradient are one
            new.append(take(4 * self.table))
            drop(head, embedding)
        else:
            new.append(embedding)
        self._accumulate(new)

    def update(self) -> None:
        """The optimizer's moments are made in the first one. Gradients are set to None, unless they are kept."""
        self._make_state()
        if not self.keeps_gradients:
            self.memory.give_back(*self.gradients)
            self.gradients = []

    def settle(self) -> None:
        """Gradients and moments before anything else, as gptfit's engine makes them."""
        self.keeps_gradients = True
        self.gradients = [self.memory.take(4 * weight.size) for weight in self.setting.shape.weights()]
        self._make_state()

    def _make_state(self) -> None:
        is_muon = self.setting.optimizer == "muon"
        for weight in self.setting.shape.weights() if not self.state else ():
            moments = 1 if is_muon and weight.kind == "matrix" else 2
            self.state += [self.memory.take(4 * weight.size) for _ in range(moments)]

    def _forward(self) -> list[Piece]:
        """What a block keeps; the results of its two projections are gone when the next norm has been computed."""
        take, x = self.memory.take, self.tensor
        attention = [
            take(2 * x),
            take(6 * self.square),
            take(6 * x),
            take(2 * x),
            take(self.sums),
            take(2 * self.square),
        ]
        more = [take(2 * x) for _ in range(3 * self.is_modern)]
        projected = take(2 * x)
        mlp = [take(4 * x), take(2 * x), take(8 * self.square), take(8 * x), take(8 * self.square), take(8 * x)]
        projected_too = take(2 * x)
        next_norm = take(4 * x)
        self.memory.give_back(projected, projected_too)
        return [*attention, *mlp, next_norm, *more]

    def _backward(self, block: list[Piece]) -> list[Piece]:
        """Gradients of its matrices. 16-bit ones are computed first and widened."""
        take, drop, x = self.memory.take, self.memory.give_back, self.tensor
        norm_1, qkv_copy, qkv, attended, sums, out_copy, between, norm_2, fc_copy, fc, mlp_copy, gelu, beyond, *more = (
            block
        )
        drop(beyond)
        narrow, wide = take(8 * self.square), take(8 * x)
        drop(gelu, mlp_copy)
        new = [take(16 * self.square)]
        drop(fc, norm_2, fc_copy)
        new.append(take(16 * self.square))
        drop(wide, narrow, between)
        narrow, small = take(2 * self.square), take(2 * x)
        drop(out_copy)
        new.append(take(4 * self.square))
        rows, *thirds, total = take(self.sums), take(2 * x), take(2 * x), take(2 * x), take(4 * x)
        drop(rows, total, small, narrow, attended, sums, *more)
        turned = [take(4 * x) for _ in range(2 * self.is_modern)]
        joined = take(6 * x)
        drop(*thirds, *turned, qkv)
        narrow = take(6 * self.square)
        drop(norm_1, qkv_copy)
        new.append(take(12 * self.square))
        drop(narrow, joined)
        return new

    def _gradient_of(self, logits: Piece) -> Piece:
        """In place of the logits; else beside them, and where those are returned, beside a gradient of zeros too.

        Autograd makes one for an output from which no loss was computed. The loop's variable names the logits until the
        next ones are there.
        """
        if self.setting.logits == "replaced":
            return logits
        if self.setting.logits == "kept":
            gradient = self.memory.take(2 * self.logits)
            self.memory.give_back(logits)
            return gradient
        if self.returned is not None:
            self.memory.give_back(self.returned)
        self.returned = logits
        zeros, gradient = self.memory.take(2 * self.logits), self.memory.take(2 * self.logits)
        self.memory.give_back(zeros)
        return gradient

    def _accumulate(self, new: list[Piece]) -> None:
        if self.gradients:
            self.memory.give_back(*new)  # added to those that are there
        else:
            self.gradients = new


def replay(setting: Setting, is_expandable: bool = False, is_settled: bool = False) -> Held:
    """What lives and what is held after two updates; nothing new comes after that."""
    step = CompiledStep(setting, CachingAllocator(is_expandable))
    if is_settled:
        step.settle()
    for _ in range(2):
        for _ in range(min(setting.accumulation, FEWEST_MICRO_STEPS)):
            step.micro_step()
        step.update()
    return Held(step.memory.peak_allocated, step.memory.reserved)
