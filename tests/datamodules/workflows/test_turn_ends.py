"""What ends a reply: said by tokenizer, model and template, with the real templates of ten families (20 models)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from transformers import GenerationConfig

from app.batch import Trajectory
from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationRequest
from datamodules.pipeline.player import EpisodePlayer
from datamodules.prompts.base import Prompt
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.workflows import MultiTurnWorkflow, ResponseTemplate, RLVRWorkflow, ToolWorkflow, hermes_calls
from datamodules.workflows.base import EpisodeEngine, to_trajectory
from datamodules.workflows.turn_ends import TurnEnds, model_ends, template_end
from tests.datamodules.test_rollout import tiny_model
from tests.datamodules.workflows.chat_families import FAMILIES, Family
from tests.datamodules.workflows.feedback_functions import CountingDown
from tests.datamodules.workflows.scripted_engine import Pool, ScriptedEngine, generated, play
from tests.datamodules.workflows.test_tools import a_call
from tests.datamodules.workflows.toolboxes import Sums

ASKED = Prompt(id="q", messages=({"role": "user", "content": "17+25?"},), answer="42")
REPLY = "It is 41."
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())


def ids(family: Family, names: Any) -> list[int]:
    return family.tokenizer().convert_tokens_to_ids(list(names))


def saying(ends: list[int]) -> Any:
    """A model whose generation configuration names these ends."""
    model = tiny_model(vocab_size=400)
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.config.eos_token_id = ends[0]
    return model


@every_family
def test_the_end_is_found_in_the_template(family: Family) -> None:
    tokenizer = family.tokenizer()
    chat = Chat(tokenizer)
    assert tokenizer.convert_ids_to_tokens(chat.end) == family.end
    closing = family.end if family.closing is None else family.closing
    assert (tokenizer.convert_ids_to_tokens(chat.closing) if chat.closing is not None else "") == closing


@every_family
def test_a_later_prompt_has_one_end_of_turn_whatever_ended_the_reply(family: Family) -> None:
    tokenizer = family.tokenizer()
    chat, told = Chat(tokenizer), [{"role": "user", "content": "1 left"}]
    turns = [*ASKED.messages, {"role": "assistant", "content": REPLY}, *told]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    behind = tokenizer.encode(rendered.partition(REPLY)[2], add_special_tokens=False)
    ends = ids(family, {family.eos, family.end, *family.model})
    closing = family.end if family.closing is None else family.closing
    closed = behind.index(ids(family, [closing])[0]) + 1 if closing else 0

    assert chat.after_reply(told, None, ends) == behind  # cut off: the template's end, and nothing else
    for last in ends:
        after = chat.after_reply(told, last, ends)
        # GLM's reply ends with what begins the next message: that is not said again, another end stands before it.
        assert after == (behind[1:] if last == behind[0] else behind[closed:])
        assert last not in after[:1]
    # A stop of the user's own ends no turn.
    assert chat.after_reply(told, tokenizer.encode(".")[0], ends) == behind


@every_family
def test_an_episode_of_several_turns(family: Family) -> None:
    tokenizer = family.tokenizer()
    said = tokenizer.encode(REPLY, add_special_tokens=False)
    text = tokenizer.apply_chat_template(list(ASKED.messages), tokenize=False, add_generation_prompt=True)
    end, closing = ids(family, [family.end, family.end if not family.closing else family.closing])
    workflow = MultiTurnWorkflow(max_new_tokens=40, feedback=CountingDown(2))
    engine = ScriptedEngine(tokenizer, [[*said, end], [*said, end]])
    (whole,) = play(workflow, engine, tokenizer, ASKED, lambda prompt, reply: float(reply == REPLY))
    assert engine.seen[0].tokens == tokenizer.encode(text, add_special_tokens=False)
    assert set(ids(family, [family.eos, family.end])) <= set(engine.seen[0].stop_token_ids)
    # Sampled ids stay, the end among them; then what the template has between two turns, without another end.
    later = engine.seen[1].tokens
    assert later[: len(engine.seen[0].tokens) + len(said) + 1] == [*engine.seen[0].tokens, *said, end]
    follows = tokenizer.decode(later[len(engine.seen[0].tokens) + len(said) + 1 :])
    assert "1 left" in follows and not follows.lstrip("\n").startswith(tokenizer.decode([closing]))
    assert generated(whole) == [*said, end] * 2
    assert whole.reward == 1.0 and whole.finish_reason == "stop"


@pytest.mark.parametrize("name", ["Qwen2.5 base", "Qwen3", "Llama 3.1", "GLM 4.5", "LFM2", "Nemotron 3"])
def test_tools_answer_behind_one_end_of_turn(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    # What ends a reply that calls tools, as these models were trained.
    end = {"Llama 3.1": "<|eom_id|>", "GLM 4.5": "<|observation|>"}.get(name, family.end)
    chat = Chat(tokenizer)
    over = "</think>" if chat.opened(chat.prompt([{"role": "user", "content": "."}])) else ""
    call = tokenizer.encode(over + a_call("add", a=2, b=3), add_special_tokens=False)
    replies = [[*call, *ids(family, [end])], [*tokenizer.encode("5"), *ids(family, [end])]]
    engine = ScriptedEngine(tokenizer, replies)
    workflow = ToolWorkflow(Sums(), max_new_tokens=200, parser=lambda text: hermes_calls(text))  # not the family's
    workflow.prepare(tokenizer)
    asked = Prompt(id="p", messages=ASKED.messages, answer="5")
    given = Prompt(id="p", messages=ASKED.messages, answer="5", tokens=tuple(workflow.encode(asked)))
    pool: Any = Pool(lambda prompt, reply: float(reply == "5"))
    ends = TurnEnds.of(tokenizer, saying(ids(family, family.model)))
    player = EpisodePlayer(workflow, engine, tokenizer, pool, 60.0, ends)
    (whole,) = asyncio.run(player.play(given, name="e", seed="s"))
    follows = tokenizer.decode(engine.seen[1].tokens[len(engine.seen[0].tokens) + len(replies[0]) :])
    assert "5" in follows and not any(follows.lstrip().startswith(one) for one in {end, family.end})
    assert whole.reward == 1.0 and generated(whole) == [*replies[0], *replies[1]]


def test_results_that_the_template_would_not_show_are_refused() -> None:
    tokenizer = FAMILIES["Gemma 4"].tokenizer()
    with pytest.raises(ValueError, match=r"ToolWorkflow\.tool_role: .* role 'tool' .* set tool_role: user"):
        ToolWorkflow(Sums()).prepare(tokenizer)
    ToolWorkflow(Sums(), tool_role="user", parser=ResponseTemplate()).prepare(tokenizer)


@every_family
def test_all_that_end_a_reply(family: Family) -> None:
    tokenizer = family.tokenizer()
    ends = TurnEnds.of(tokenizer, saying(ids(family, family.model)))
    assert {tokenizer.convert_ids_to_tokens(one) for one in ends.ids} == {family.eos, family.end, *family.model}
    line = ends.line(tokenizer, ("</answer>",))
    assert "\n" not in line and all(repr(one) in line for one in (family.eos, family.end, *family.model))
    assert line.endswith("'</answer>' (stop)")


def test_who_says_so() -> None:
    tokenizer = FAMILIES["Gemma 2"].tokenizer()
    eos, turn = tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"])
    ends = TurnEnds.of(tokenizer, saying([eos, turn]))
    assert ends.said_by == {eos: ("tokenizer", "model"), turn: ("model", "template")}
    assert ends.line(tokenizer) == (
        f"a reply ends with '<eos>' = {eos} (tokenizer, model), '<end_of_turn>' = {turn} (model, template)"
    )
    # Tokens that the model has no row for cannot be sampled, and engines refuse them as stops.
    assert TurnEnds.of(tokenizer, saying([eos, 999]), vocab_size=turn).ids == (eos,)


def test_models_name_one_end_or_several_or_none() -> None:
    assert model_ends(saying([3, 7])) == [3, 7]
    model = saying([3])
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert model_ends(model) == []
    model.config.eos_token_id = 9  # SGLang, too, takes both
    model.generation_config.eos_token_id = 4
    assert model_ends(model) == [4, 9]


def test_templates_without_an_end_leave_it_to_the_tokenizer() -> None:
    tokenizer = load_tokenizer("char:0123456789+=?\n ")
    assert template_end(tokenizer) is None and TurnEnds.of(tokenizer).ids == (tokenizer.eos_token_id,)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert template_end(tokenizer) is None
    tokenizer.chat_template = None
    assert template_end(tokenizer) is None


class Own:
    """A user's workflow, which names the end of sequence it knows, or none."""

    max_new_tokens = 8

    def __init__(self, stop: tuple[int, ...]) -> None:
        self.stop_ids = stop

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        request = GenerationRequest(list(prompt.tokens), 8, stop_token_ids=self.stop_ids)
        return [to_trajectory(prompt, request, await engine.generate(request))]


def test_every_workflow_ends_where_the_model_does() -> None:
    family = FAMILIES["Gemma 2"]
    tokenizer = family.tokenizer()
    eos, turn = ids(family, ["<eos>", "<end_of_turn>"])
    ends = TurnEnds.of(tokenizer, saying([eos, turn]))
    prompt = Prompt(id="p", text="x", tokens=(5,))
    for stop, asked in (((eos,), (eos, turn)), ((), ())):
        engine = ScriptedEngine(tokenizer, [[9, turn]])
        player = EpisodePlayer(Own(stop), engine, tokenizer, None, 60.0, ends)
        asyncio.run(player.play(prompt, name="e", seed="s"))
        assert engine.seen[0].stop_token_ids == asked


def test_the_reward_does_not_see_what_ended_the_reply() -> None:
    tokenizer = load_tokenizer("char:0123456789+=|")  # '|' ends this model's replies, and is no special token here
    bar = tokenizer.encode("|")[0]
    workflow = RLVRWorkflow(max_new_tokens=4)
    workflow.prepare(tokenizer)
    pool: Any = Pool(lambda prompt, reply: float(reply == "42"))
    player = EpisodePlayer(
        workflow,
        ScriptedEngine(tokenizer, [tokenizer.encode("42|")]),
        tokenizer,
        pool,
        60.0,
        TurnEnds.of(tokenizer, saying([tokenizer.eos_token_id, bar])),
    )
    prompt = Prompt(id="p", text="1+41=", tokens=tuple(tokenizer.encode("1+41=")))
    (one,) = asyncio.run(player.play(prompt, name="e", seed="s"))
    assert pool.asked == ["42"] and one.reward == 1.0
    assert generated(one) == tokenizer.encode("42|") and one.finish_reason == "stop"
