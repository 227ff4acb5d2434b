"""Which server a prompt goes to: where its prefix is, unless load says otherwise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.inference.sglang.router import PrefixRouter


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=length)


def test_the_turns_of_a_conversation_stay_where_they_began() -> None:
    router = PrefixRouter(load_tokens=100)
    conversation, running = prompt(700, 1), {"a": 0, "b": 0, "c": 0}
    first = router.choose(conversation, running)
    running[first] = 3  # busier than the others since
    for turn in range(2, 6):
        conversation = conversation + prompt(90, turn)
        assert router.choose(conversation, running) == first


def test_a_group_shares_its_prompt_until_the_load_outweighs_it() -> None:
    router = PrefixRouter(load_tokens=100)
    running = {"a": 0, "b": 0}
    for _ in range(16):
        running[router.choose(prompt(1000, 1), running)] += 1
    # A prompt of 1,000 tokens is worth ten requests: the other server takes over once ten behind, and then has it.
    assert sorted(running.values()) == [6, 10]
    short = {"a": 0, "b": 0}
    for _ in range(16):
        short[router.choose(prompt(20, 2), short)] += 1
    assert short == {"a": 8, "b": 8}


def test_nothing_shared_spreads_evenly() -> None:
    router, running = PrefixRouter(), dict.fromkeys("abcd", 0)
    for seed in range(40):
        running[router.choose(prompt(300, seed), running)] += 1
    assert set(running.values()) == {10}


def test_a_prefix_within_a_block_counts_from_the_block_before() -> None:
    router = PrefixRouter(load_tokens=1)
    base = prompt(130, 1)
    chosen = router.choose(base, {"a": 0, "b": 0})
    other = "b" if chosen == "a" else "a"
    branch = base[:100] + prompt(60, 2)  # shares 100 tokens: one block of 64
    assert router.choose(branch, {chosen: 63, other: 0}) == chosen
    assert PrefixRouter(load_tokens=1).choose(branch, {chosen: 63, other: 0}) == other


def test_forgotten_caches_and_absent_servers_do_not_attract() -> None:
    router = PrefixRouter(load_tokens=10)
    long = prompt(640, 1)
    assert router.choose(long, {"a": 0, "b": 1}) == "a"
    assert router.choose(long, {"a": 5, "b": 0}) == "a"
    assert router.choose(long, {"b": 0, "c": 1}) == "b"  # a is away or full
    router.forget("a")
    assert router.choose(long, {"a": 0, "b": 9}) == "b"
    router.forget()
    assert router.choose(long, {"a": 0, "b": 1}) == "a"


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    router = PrefixRouter(load_tokens=1, memory=8)
    old, new = prompt(256, 1), prompt(512, 2)
    assert router.choose(old, {"a": 0, "b": 1}) == "a"
    assert router.choose(new, {"a": 1, "b": 0}) == "b"
    assert len(router._seen) == 8
    assert router.choose(old, {"a": 1, "b": 0}) == "b"  # nothing is known of it any more


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=200), min_size=1, max_size=30), st.integers(1, 4))
def test_always_a_server_that_was_offered_and_the_same_again(prompts: list[list[int]], count: int) -> None:
    def run() -> list[object]:
        router, running = PrefixRouter(load_tokens=16, memory=32), dict.fromkeys(range(count), 0)
        chosen = []
        for tokens in prompts:
            chosen.append(router.choose(tokens, running))
            running[chosen[-1]] += 1  # type: ignore[index]
        assert set(chosen) <= set(running) and len(router._seen) <= 32
        return chosen

    assert run() == run()


def test_load_tokens_is_checked() -> None:
    with pytest.raises(ValueError, match="load_tokens: 0"):
        PrefixRouter(load_tokens=0)
