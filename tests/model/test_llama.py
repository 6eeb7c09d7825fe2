"""Llama-like models: norms, rotation, gates and heads by hand; counts and FLOPs as published;
neutral settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from efftrain_cli.foundation.step import Progress
from efftrain_cli.model.block import MLP, RMSNorm, Rope
from efftrain_cli.model.config import GPTConfig
from efftrain_cli.model.flops import flops_per_token, parameter_count
from efftrain_cli.model.gpt import GPT
from efftrain_cli.model.kernels import attention_kernels
from efftrain_cli.plan.plan import plan_step
from tests.tiny import (
    LLAMA_SHAPE,
    config_of,
    drawn,
    gradient_of,
    init_weights,
    random_batch,
    tiny_recipe,
)

TOY_A = config_of(
    n_layer=4,
    n_head=4,
    n_kv_head=2,
    n_embd=128,
    seq_len=256,
    vocab_size=512,
    norm_eps=1e-6,
    **LLAMA_SHAPE,
)
TOY_B = replace(TOY_A, tied=False, qk_norm=True)


def published(
    n_embd: int,
    n_layer: int,
    n_head: int,
    n_kv_head: int,
    head_dim: int,
    d_ff: int,
    vocabulary: int,
) -> GPTConfig:
    return replace(
        TOY_A,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=head_dim,
        n_embd=n_embd,
        d_ff=d_ff,
        seq_len=2048,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
    )


GPT2 = config_of(
    n_layer=12, n_head=12, n_embd=768, seq_len=1024, vocab_size=50257, padded_vocab_size=50257
)
SMOLLM2 = published(576, 30, 9, 3, 64, 1536, 49152)
QWEN3 = replace(published(1024, 28, 16, 8, 128, 3072, 151936), qk_norm=True)
LLAMA_1B = published(2048, 16, 32, 8, 64, 8192, 128256)


@pytest.mark.parametrize(
    "config, total, flops",
    [
        (GPT2, 124_439_808, None),
        (TOY_A, 803_968, 6_396_672),
        (TOY_B, 869_760, 6_398_208),
        (SMOLLM2, 134_515_008, 1.231763e9),
        (QWEN3, 596_049_920, 4.985586e9),
        (LLAMA_1B, 1_235_814_400, 8.220193e9),
    ],
)
def test_counts_and_flops_are_the_published_ones(config, total, flops):
    assert parameter_count(config) == total
    if flops is not None:
        counted = flops_per_token(config, config.seq_len, config.n_layer)
        assert counted.with_logits == pytest.approx(flops, rel=1e-6)


@pytest.mark.parametrize(
    "eps, expected",
    [
        (1e-6, [0.34299717, 0.68599434, 1.02899151, 1.37198868]),
        (1e-5, [0.23904572, 0.47809144, 0.71713717, 0.95618289]),
    ],
)
def test_rms_norm_by_hand(eps, expected):
    x = torch.tensor([1e-3, 2e-3, 3e-3, 4e-3])
    norm = RMSNorm(4, eps)
    assert norm(x).tolist() == pytest.approx(expected, rel=1e-6)
    norm.weight.data.fill_(2.0)
    assert norm(x).tolist() == pytest.approx([2 * y for y in expected], rel=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_rotation_by_hand():
    """Position 3, theta 1e4, halves of two channels."""
    rope = Rope(config_of(n_head=1, n_embd=4, seq_len=5, positions="rope"))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).expand(1, 5, 1, 4)
    expected = [-1.41335252, 1.87911807, -2.82885748, 4.05819114]
    assert rope(x, 0)[0, 3, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert rope(x[:, :1], 3)[0, 0, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(rope(x, 0)[0, 0, 0], x[0, 0, 0])


@pytest.mark.parametrize(
    "kind, expected",
    [
        # up is 2 x: silu(x) 2 x
        ("swiglu", [2 * 0.26894142, 0, 2 * 0.73105858, 4 * 1.76159416]),
        ("relu2", [0, 0, 1, 4]),
    ],
)
def test_gated_and_squared_mlps_by_hand(kind, expected):
    mlp = MLP(replace(TOY_A, n_embd=4, n_head=1, n_kv_head=1, d_ff=4, mlp=kind))
    for name, parameter in mlp.named_parameters():
        parameter.data = 2 * torch.eye(4) if name == "c_up.weight" else torch.eye(4)
    x = torch.tensor([-1.0, 0.0, 1.0, 2.0])
    assert mlp(x).tolist() == pytest.approx(expected, abs=1e-6)


def test_query_heads_share_keys_in_groups():
    """Query head j reads head j // 2 of the keys: the model with each key head written twice is the
    same."""
    model = made(replace(TOY_A, n_layer=1))
    plain = GPT(replace(model.config, n_kv_head=None))
    weights = model.state_dict()
    q, k, v = weights["h.0.attn.c_attn.weight"].split(model.config.qkv_rows)
    twice = [part.view(2, 32, 128).repeat_interleave(2, 0).flatten(0, 1) for part in (k, v)]
    weights["h.0.attn.c_attn.weight"] = torch.cat([q, *twice])
    plain.load_state_dict(weights)
    tokens = drawn(512, 2, 20, seed=0)
    assert torch.equal(model(tokens), plain(tokens))


def made(config: GPTConfig) -> GPT:
    model = GPT(config)
    init_weights(model, 3)
    return model


@pytest.mark.parametrize("config", [TOY_A, TOY_B, replace(TOY_A, softcap=5.0)])
def test_cached_keys_give_the_logits_of_one_pass(config):
    model = made(config)
    tokens = drawn(512, 2, 24, seed=1)
    whole, caches, parts = model(tokens), model.new_caches(), []
    with torch.inference_mode(), attention_kernels(tokens.device, same_shape=False):
        for piece in tokens.split([9, 1, 1, 13], dim=1):
            parts.append(model.head(model.hidden(piece, caches)))
    torch.testing.assert_close(torch.cat(parts, 1), whole.detach(), rtol=0, atol=2e-6)
    assert [part.shape for part in caches[0].pair] == 2 * [(2, config.kv_heads, 24, 32)]


def test_hf_initialization_shrinks_no_projection():
    model = made(replace(TOY_B, n_layer=8, init="hf"))
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_up", "mlp.c_proj"):
        weight = model.get_parameter(f"h.3.{name}.weight")
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert (model.h[3].attn.q_norm.weight == 1).all()


@pytest.mark.parametrize(
    "changes, key, rule",
    [
        ({"n_kv_head": 3}, "n_kv_head", "must divide model.n_head = 4:"),
        ({"head_dim": 7}, "head_dim", 'must be even with model.positions = "rope",'),
        ({"n_head": 3, "n_kv_head": 3, "n_embd": 125}, "n_head", "must divide model.n_embd = 125:"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, key, rule):
    config = replace(TOY_A, **changes)
    found = dict(config.validation_errors())
    assert found[key].startswith(rule)
    with pytest.raises(ValueError, match=rule):
        GPT(config)


@pytest.mark.parametrize("softcap", ["false", "5.0"])
def test_z_loss_is_minimized_and_reported_apart(softcap):
    recipe = tiny_recipe("optim.z_loss=0.1", f"model.softcap={softcap}")
    plan = plan_step(recipe, Progress())
    batch = random_batch(plan)
    model, result = gradient_of(recipe, batch=batch)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(batch.tokens).flatten(0, 1)
    ce = torch.nn.functional.cross_entropy(logits, batch.targets.flatten())
    z = 0.1 * torch.logsumexp(logits, -1).square().mean()
    (ce + z).backward()
    assert result.scalars["loss"].item() == pytest.approx(ce.item(), rel=1e-5)
    assert result.scalars["z_loss"].item() == pytest.approx(z.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        loss = model.loss_sum(batch.tokens, batch.targets).item()
    assert loss / batch.targets.numel() == pytest.approx(ce.item(), rel=1e-6)
