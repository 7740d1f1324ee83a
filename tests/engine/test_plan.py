"""The batch plan against the semantics of a shuffling data loader, written out by hand."""

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedexp.algorithms import fedavg
from fedexp.data.federation import Federation
from fedexp.data.transforms import Images
from fedexp.engine.plan import (
    EPOCH_BITS,
    Work,
    batch_key,
    device_rows,
    host_rows,
    plan_batches,
    plan_cohort,
)
from fedexp.local import LocalTraining
from fedexp.models import logistic
from fedexp.seeding import generator, torch_seed
from fedexp.tasks.supervised import classification

Plan = list[NDArray[np.int64]]
SIZES, BATCHES, STEPS = st.integers(1, 40), st.integers(1, 45), st.integers(1, 30)
SEEDS = st.integers(0, 2**32)


def chance(key: int, client: int, place: int) -> int:
    """SplitMix64 in whole numbers: the stream of a client, and its number at a place from 1."""
    golden, word = 0x9E3779B97F4A7C15, 2**64

    def mixed(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ z >> 27) * 0x94D049BB133111EB % word
        return z ^ z >> 31

    stream = mixed((key + golden * (client + 1)) % word)
    return mixed((stream + golden * place) % word) >> 1


def orders_by_hand(key: int, client: int, size: int) -> Iterator[list[int]]:
    """Epoch after epoch, the examples in the order of the numbers they draw."""
    for epoch in count():
        drawn = [chance(key, client, epoch * size + i + 1) >> EPOCH_BITS for i in range(size)]
        yield sorted(range(size), key=lambda i: drawn[i])


def loader_by_hand(orders: Iterator[list[int]], batch: int, steps: int) -> Plan:
    """`while steps remain: for batch in DataLoader(shuffle=True, drop_last=False): step`.

    One permutation an epoch; the sampler yields it, and the batches are filled one example at a
    time, as torch's `BatchSampler` does.
    """
    done: Plan = []
    while len(done) < steps:
        waiting: list[int] = []
        epoch: Plan = []
        for example in next(orders):
            waiting.append(example)
            if len(waiting) == batch:
                epoch.append(np.array(waiting))
                waiting = []
        if waiting:  # drop_last=False
            epoch.append(np.array(waiting))
        for each in epoch:
            if len(done) == steps:
                break
            done.append(each)
    return done


def equal(first: Plan, second: Plan) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


@given(size=SIZES, batch=BATCHES, steps=STEPS, seed=SEEDS, round=SEEDS, client=SEEDS)
def test_equals_a_restarted_shuffling_loader(
    size: int, batch: int, steps: int, seed: int, round: int, client: int
) -> None:
    local = LocalTraining(steps=steps, batch_size=batch)
    plan = plan_batches(seed, round, client, size, local)
    orders = orders_by_hand(torch_seed(seed, "batches", round), client, size)
    assert equal(plan, loader_by_hand(orders, batch, steps))


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    batch=st.none() | BATCHES,
    length=st.tuples(STEPS, st.none()) | st.tuples(st.none(), st.integers(1, 3)),
    seed=SEEDS,
)
def test_a_cohort_is_planned_as_its_clients_are(
    sizes: list[int], batch: int | None, length: tuple[int | None, int | None], seed: int
) -> None:
    """By numpy and by torch, all clients at once, each batch padded with its first row."""
    local = LocalTraining(steps=length[0], epochs=length[1], batch_size=batch)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rows = {"x": torch.zeros(offsets[-1], 1), "y": torch.zeros(offsets[-1], dtype=torch.int64)}
    task = classification("task", lambda: logistic(1, 2), Federation(rows, offsets))
    clients = list(range(len(sizes)))
    plan = plan_cohort(Work(task, fedavg(), local, "uniform", seed, 3, np.array(clients)), clients)
    key, steps = batch_key(seed, 3), len(plan.lengths)
    on_host = host_rows(key, plan.who, steps, plan.width, batch)
    seen = np.broadcast_to(on_host, (steps, *on_host.shape[1:]))  # one for all on whole batches
    on_device = device_rows(
        torch.tensor(key), torch.from_numpy(plan.who), steps, plan.width, plan.reach, batch
    )
    assert np.array_equal(on_device.numpy(), seen)
    for client in clients:
        one = plan_batches(seed, 3, client, sizes[client], local)
        assert plan.lengths[:, client].tolist()[: len(one)] == [len(each) for each in one]
        assert not plan.lengths[len(one) :, client].any()
        for step, each in enumerate(one):
            assert np.array_equal(seen[step, client, : len(each)], offsets[client] + each)
            assert (seen[step, client, len(each) :] == seen[step, client, 0]).all()


@given(size=SIZES, batch=BATCHES, epochs=st.integers(1, 5), seed=SEEDS)
def test_each_epoch_is_a_permutation(size: int, batch: int, epochs: int, seed: int) -> None:
    plan = plan_batches(seed, 1, 0, size, LocalTraining(epochs=epochs, batch_size=batch))
    per_epoch = -(-size // batch)
    assert len(plan) == epochs * per_epoch
    for at in range(0, len(plan), per_epoch):
        epoch = plan[at : at + per_epoch]
        assert sorted(np.concatenate(epoch)) == list(range(size))
        assert all(len(each) == batch for each in epoch[:-1])
        assert len(epoch[-1]) == size - (per_epoch - 1) * batch


@given(size=SIZES, batch=BATCHES, steps=STEPS, seed=SEEDS)
def test_more_steps_continue_the_same_plan(size: int, batch: int, steps: int, seed: int) -> None:
    short, long = (
        plan_batches(seed, 1, 0, size, LocalTraining(steps=n, batch_size=batch))
        for n in (steps, steps + 7)
    )
    assert equal(short, long[:steps])


def test_a_pure_function_of_seed_round_and_client() -> None:
    local = LocalTraining(steps=4, batch_size=10)
    one = plan_batches(3, 5, 7, 100, local)
    for other in range(20):  # what other clients plan in between changes nothing
        plan_batches(3, 5, other, 17 + other, local)
    assert equal(one, plan_batches(3, 5, 7, 100, local))
    for changed in ((4, 5, 7), (3, 6, 7), (3, 5, 8)):
        assert not equal(one, plan_batches(*changed, 100, local))


def test_epochs_are_shuffled_anew() -> None:
    plan = plan_batches(0, 1, 0, 50, LocalTraining(epochs=2, batch_size=50))
    assert not np.array_equal(plan[0], plan[1])
    assert not np.array_equal(plan[0], np.arange(50))


def test_a_client_smaller_than_a_batch_sees_all_of_its_data_at_every_step() -> None:
    plan = plan_batches(0, 1, 0, 7, LocalTraining(steps=20, batch_size=50))
    assert len(plan) == 20
    assert all(sorted(each) == list(range(7)) for each in plan)


@pytest.mark.parametrize(("steps", "epochs", "expected"), [(3, None, 3), (None, 2, 2)])
def test_without_a_batch_size_a_step_is_all_of_the_data(
    steps: int | None, epochs: int | None, expected: int
) -> None:
    plan = plan_batches(0, 1, 0, 5, LocalTraining(steps=steps, epochs=epochs, batch_size=None))
    assert [each.tolist() for each in plan] == [[0, 1, 2, 3, 4]] * expected


def test_a_client_of_more_examples_than_a_key_has_bits_for() -> None:
    """Positions no longer fit the low bits of the keys, and a stable sort gives the same order."""
    size = 2**EPOCH_BITS + 1
    (epoch,) = plan_batches(0, 1, 0, size, LocalTraining(epochs=1, batch_size=size))
    key, who = torch.tensor(batch_key(0, 1)), torch.tensor([[0], [size], [0]])
    assert np.array_equal(epoch, device_rows(key, who, 1, size, 2 * size, size)[0, 0].numpy())


def test_a_small_client_next_to_one_of_more_examples_than_a_key_has_bits_for() -> None:
    """It could pass over its data more often than epochs fit a key."""
    local, clients = LocalTraining(steps=2, batch_size=1), np.array([0, 1])
    key, sizes, reach = torch.tensor(batch_key(0, 1)), np.array([1, 2]), 2 ** (EPOCH_BITS + 2)
    who = torch.from_numpy(np.stack([clients, sizes, np.zeros_like(sizes)]))
    rows = device_rows(key, who, 2, 1, reach, 1)
    for client, size in enumerate(sizes.tolist()):
        expected = np.stack(plan_batches(0, 1, client, size, local))
        assert np.array_equal(rows[:, client].numpy(), expected)


def test_every_order_is_as_likely() -> None:
    """Three examples, one epoch: the six orders come up about as often."""
    local = LocalTraining(epochs=1, batch_size=1)
    orders = [tuple(np.concatenate(plan_batches(0, r, 0, 3, local))) for r in range(1200)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 150


def test_augmentation_is_a_function_of_seed_round_client_and_step() -> None:
    """What a client trains on, by hand; the rest of the cohort has no part in it."""
    pixels = np.random.default_rng(0).integers(256, size=(30, 1, 6, 6), dtype=np.uint8)
    fields = {"x": torch.from_numpy(pixels), "y": torch.arange(30) % 2}
    images, local = Images((0.5,), (0.25,)), LocalTraining(steps=5, batch_size=4)
    federation = Federation(fields, np.array([0, 10, 19, 30]))
    task = classification("task", lambda: logistic(36, 2), federation, transform=images)
    plan = plan_batches(3, 7, 1, 9, local)
    for cohort in ([1], [0, 1, 2]):
        work = Work(task, fedavg(), local, "uniform", 3, 7, np.array(cohort))
        rng = generator(3, "augment", 7, 1)
        for step, batch in enumerate(work.batches(1)):
            draws = images.draw(rng, len(plan[step]))
            by_hand = images.train(federation.batch(1, plan[step]), draws)
            assert torch.equal(batch["x"], by_hand["x"])
            assert torch.equal(batch["y"], by_hand["y"])
