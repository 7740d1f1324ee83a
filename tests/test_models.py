"""The models: their size, their shapes, and that they run for many clients as one program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedexp.errors import UsageError
from fedexp.models import (
    GPTLayer,
    Residual,
    cifar_cnn,
    emnist_cnn,
    logistic,
    mlp,
    resnet18,
    tinygpt,
)
from fedexp.seeding import seeded_torch

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "emnist-cnn": (emnist_cnn, (1, 28, 28), 62),
    "cifar-cnn": (cifar_cnn, (3, 32, 32), 10),
    "resnet18": (resnet18, (3, 8, 8), 10),  # any size works; small images take less time
    "logistic": (lambda: logistic(12, 3), (3, 4), 3),
    "mlp": (lambda: mlp(12, [5, 4], 3), (12,), 3),
}
each_model = pytest.mark.parametrize("name", CASES)


def built(name: str, seed: int = 0) -> nn.Module:
    with seeded_torch(seed, "test model"):
        return CASES[name][0]()


def inputs(name: str, examples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, *CASES[name][1], generator=generator)


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        (lambda: emnist_cnn(), 1_206_590),
        (lambda: emnist_cnn(10), 1_206_590 - 52 * 129),
        (lambda: resnet18(10), 11_173_962),
        (lambda: resnet18(10, pool="avg3", groups=32), 11_173_962),
        (lambda: resnet18(100), 11_173_962 + 90 * 513),
        (lambda: cifar_cnn(), 744_330),
        (lambda: logistic(784, 10), 7850),
        (lambda: mlp(784, 200, 10), 784 * 200 + 200 + 200 * 10 + 10),
    ],
)
def test_the_number_of_parameters(module: Callable[[], nn.Module], parameters: int) -> None:
    assert size(module()) == parameters


@each_model
def test_models_return_class_scores_and_have_no_state(name: str) -> None:
    module = built(name).eval()
    assert not list(module.buffers())
    x = inputs(name, 2)
    before = x.clone()
    with torch.no_grad():
        both, alone = module(x), module(x[:1])
    assert both.shape == (2, CASES[name][2])
    assert torch.equal(x, before)
    torch.testing.assert_close(both[:1], alone, rtol=1e-4, atol=1e-5)


@each_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    module = built(name).eval()
    loss = nn.functional.cross_entropy(module(inputs(name, 3)), torch.tensor([0, 1, 2]))
    for gradient in torch.autograd.grad(loss, list(module.parameters())):
        assert gradient.isfinite().all()
        assert gradient.any()


Loss = Callable[[dict[str, Tensor], Tensor, Tensor], Any]


def assert_as_one_program(modules: list[nn.Module], call: Loss, x: Tensor, y: Tensor) -> None:
    """`call` of (params, x, y) under vmap over the clients equals one client after another."""
    together = vmap(call)(stack_module_state(modules)[0], x, y)
    for client, module in enumerate(modules):
        params = {name: value.detach() for name, value in module.named_parameters()}
        alone = call(params, x[client], y[client])
        for one, both in zip(values(alone), values(together), strict=True):
            torch.testing.assert_close(both[client], one, rtol=1e-3, atol=1e-5)


def values(result: Any) -> list[Tensor]:
    return list(result.values()) if isinstance(result, dict) else [result]


def loss_of(module: nn.Module) -> Loss:
    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(module, params, x), y)

    return loss


@each_model
def test_many_clients_as_one_program(name: str) -> None:
    modules = [built(name, seed).eval() for seed in (0, 1)]
    x = torch.stack([inputs(name, 2, seed) for seed in (2, 3)])
    with torch.no_grad():
        assert_as_one_program(modules, loss_of(modules[0]), x, torch.tensor([[0, 1], [2, 0]]))


@pytest.mark.parametrize("name", ["cifar-cnn", "logistic", "mlp"])
def test_gradients_of_many_clients_as_one_program(name: str) -> None:
    modules = [built(name, seed) for seed in (0, 1)]
    x = torch.stack([inputs(name, 2, seed) for seed in (2, 3)])
    assert_as_one_program(modules, grad(loss_of(modules[0])), x, torch.tensor([[0, 1], [2, 0]]))


def test_gradients_of_residual_blocks_as_one_program() -> None:
    modules: list[nn.Module] = [
        nn.Sequential(Residual(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()) for _ in range(2)
    ]
    x = inputs("resnet18", 4).reshape(2, 2, 3, 8, 8)
    assert_as_one_program(modules, grad(loss_of(modules[0])), x, torch.tensor([[0, 1], [2, 0]]))


def test_dropout_runs_under_vmap_with_its_own_draws_for_each_client() -> None:
    module = built("emnist-cnn").train()
    params, _ = stack_module_state([module, module])
    x = inputs("emnist-cnn", 2)

    def scores(params: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(module, params, x)
        return output

    with seeded_torch(0, "dropout"), torch.no_grad():
        first, second = vmap(scores, randomness="different")(params)
    assert not torch.equal(first, second)


def test_avg3_pools_the_top_left_of_the_last_map() -> None:
    """Golden: the 3x3 mean of the features, by hand; the adaptive pool takes all of 4x4."""
    for pool, side in (("avg3", 3), ("adaptive", 4)):
        with seeded_torch(0, "pooling"):
            module = resnet18(pool=pool).eval()  # type: ignore[arg-type]
        *body, _, _, last = module
        x = inputs("cifar-cnn", 1)
        with torch.no_grad():
            features = nn.Sequential(*body)(x)
            assert features.shape == (1, 512, 4, 4)
            expected = last(features[:, :, :side, :side].mean(dim=(2, 3)))
            torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_a_block_with_zero_convolutions_is_its_shortcut() -> None:
    block = Residual(4, 4, groups=2)
    with torch.no_grad():
        for parameter in block.body.parameters():
            parameter.zero_()
        x = inputs("resnet18", 1).repeat(1, 2, 1, 1)[:, :4]
        assert torch.equal(block(x), x.clamp(min=0))


def test_logistic_regression_is_one_affine_map() -> None:
    module = logistic(12, 3)
    x = inputs("logistic", 5)
    layer = module[1]
    assert isinstance(layer, nn.Linear)
    torch.testing.assert_close(module(x), x.reshape(5, 12) @ layer.weight.T + layer.bias)


def test_the_layer_of_tinygpt_is_a_transformer_layer_with_gelu() -> None:
    """An independent reference: torch's layer with the same weights and its fused attention."""
    with seeded_torch(0, "layers"):
        layer = GPTLayer(12, heads=3)
        x = torch.randn(2, 7, 12)
    reference = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    names = {
        "self_attn.in_proj_": "qkv.",
        "self_attn.out_proj": "out",
        "linear1": "mlp.0",
        "linear2": "mlp.2",
    }
    weights = {**layer.state_dict(), "qkv.bias": torch.zeros(36)}
    state = {}
    for name in reference.state_dict():
        own = next((name.replace(a, b) for a, b in names.items() if a in name), name)
        state[name] = weights.pop(own)
    assert not weights
    reference.load_state_dict(state)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = reference(x, src_mask=later)
    torch.testing.assert_close(layer(x, later), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: resnet18(pool="avg4"), "pool must be one of adaptive, avg3"),  # type: ignore[arg-type]
        (lambda: resnet18(groups=3), "groups must divide"),
        (lambda: resnet18(groups=0), "groups must divide"),
        (lambda: mlp(4, 0, 2), "at least one unit"),
        (lambda: tinygpt(width=10, heads=4), "heads must divide the width of the layers, 10"),
        (lambda: tinygpt(width=0), "width must be at least 1"),
        (lambda: tinygpt(layers=0), "layers must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()
