"""The section [optim]: the optimizer, gradient clipping and the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from efftrain_cli.foundation.section import SECTION, Count
from efftrain_cli.optim.facts import OPTIMIZERS, MuonScale, OptimizerFacts, OptimizerName
from efftrain_cli.recipe.schedules import DECAY_SHAPES, SCHEDULES, DecayShape, ScheduleName

Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, config=SECTION)
class Optim:
    """The optimizer, gradient clipping and the learning-rate schedule."""

    name: OptimizerName = "adamw"
    """"adamw"; "muon": Muon for the matrices of the blocks, AdamW for embeddings, biases and layer
    norms; or "lion", the sign of a momentum, which does not read eps."""
    lr: Positive
    """Peak learning rate."""
    muon_lr: Positive | None = None
    """Peak learning rate of the matrices that Muon updates; lr is then that of all else. Both
    follow one schedule. Default with muon_scale = "match_rms_adamw": lr."""
    muon_scale: MuonScale | None = None
    """What Muon multiplies the update of a matrix by: "original", sqrt(max(1, rows / columns)); or
    "match_rms_adamw", 0.2 sqrt(max(rows, columns)), with which AdamW's rates fit. Default:
    "original"."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment; Lion's of the update and of the
    momentum."""
    beta2_tokens: Count | None = None
    """Half-life of Adam's second moment, in tokens, in place of the second beta: a step of B tokens
    has beta2 = 0.5^(B / beta2_tokens)."""
    eps: Positive = 1e-8
    """Adam's epsilon."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, on matrices except the position embeddings."""
    grad_clip: NotNegative = 1.0
    """Largest global l2 norm of the gradient; 0 clips nothing."""
    z_loss: NotNegative = 0.0
    """Factor of the mean square of the logits' log-sum-exp, minimized beside the cross-entropy and
    reported apart."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warmup."""
    schedule: ScheduleName = "cosine"
    """Decay after the warmup; "wsd" (warmup, stable, decay) stays at the peak and decays at the
    end, "inverse_sqrt" falls with the square root of the tokens since step 1 and never
    ends."""
    decay_share: float | None = Field(default=None, gt=0, le=1)
    """With "wsd": the last share of the budget, in which the learning rate decays."""
    decay_shape: DecayShape | None = None
    """With "wsd": the curve of the decay over its share x: "linear", 1 - x; "1-sqrt", 1 - sqrt(x);
    "cosine", a half wave; or "square", 1 - x^2. Default: "linear"."""
    decay_tokens: Count | None = None
    """Tokens at which min_lr is reached; default: train.tokens."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Decay by steps instead: the step at which min_lr is reached."""

    @property
    def facts(self) -> OptimizerFacts:
        """What the optimizer can do."""
        return OPTIMIZERS[self.name]

    def beta2_at(self, tokens: int) -> float | None:
        """Return beta2 in a step of so many tokens; None: the second of `betas` in every step.

        Marek et al. 2025, arXiv 2507.07101, section 3: beta2^(B'/B) at batch B' has the half-life
        in tokens of beta2 at batch B.
        """
        if self.beta2_tokens is None:
            return None
        return 0.5 ** (tokens / self.beta2_tokens)

    @property
    def has_end(self) -> bool:
        """Whether the schedule reaches min_lr, after decay_tokens or decay_steps."""
        return SCHEDULES[self.schedule].has_end

    def lr_at(self, step: int, tokens: int, warmup_tokens: int, decay_tokens: int) -> float:
        """Return the learning rate of 1-based `step`, whose own tokens are included in `tokens`.

        Linear warmup by steps, then the schedule's decay by tokens between `warmup_tokens` (tokens
        trained when the warmup ended) and `decay_tokens`, or by steps where `decay_steps` is set.
        Megatron-LM, optimizer_param_scheduler.py. With "wsd" (Hu et al. 2024, MiniCPM, section 4)
        the decay begins where the last `decay_share` of `decay_tokens` or `decay_steps` does. A
        schedule without an end goes by tokens.
        """
        if step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps

        schedule = SCHEDULES[self.schedule]
        by_steps = self.decay_steps is not None
        if not schedule.has_end:
            # A run that is resumed with a warmup has counted no tokens of it.
            by_steps = not warmup_tokens
        done = tokens
        start: float = warmup_tokens
        end = decay_tokens
        if by_steps:
            done = step
            start = self.warmup_steps
            end = self.decay_steps or decay_tokens

        x = start / max(start, done)
        if schedule.has_end:
            if done >= end:
                return self.min_lr
            if self.decay_share is not None:
                start = max(start, (1 - self.decay_share) * end)
                if done <= start:
                    return self.lr
            x = (done - start) / (end - start)
        share_at = schedule.share
        if self.decay_shape is not None:
            share_at = DECAY_SHAPES[self.decay_shape]
        share = share_at(x)
        if share == 1:
            return self.lr
        return self.min_lr + (self.lr - self.min_lr) * share
