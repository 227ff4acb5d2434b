"""Starts and ends one SGLang server process, in an environment of its own: its dependencies exclude the trainer's.

Promises: environments are found, never built or changed; the server listens on loopback unless told otherwise; it
writes to a log file of its own, whose end is in the error when it does not come up before the deadline; `stop` leaves
no process, no shared memory and no file of it behind, and neither does a launcher that is killed (see
server/serve_main.py). Nothing starts in a constructor.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerClient
from datamodules.inference.sglang.server import leftovers
from datamodules.processes.awake import awake

API_KEY_VARIABLE = "ARBORIST_SGLANG_API_KEY"
_PYTHON_VARIABLE = "ARBORIST_SGLANG_PYTHON"
_ENVIRONMENT = Path(__file__).resolve().parents[3] / ".venv-sglang"
_MAIN = Path(__file__).parent / "server" / "serve_main.py"
_TAIL_LINES = 25
_TAIL_BYTES = 64_000  # a log of days has gigabytes
_SERVED = {"float64": "float32", **{one: one for one in ("float32", "bfloat16", "float16")}}  # it has no float64
_SIGNALS = {int(one): one.name for one in signal.Signals}
_HEALTH_POLL_S = 0.2
_END_S = 10.0  # for killed processes to be gone
_ATTEMPTS = 3  # another process may take a free port before the server does
# A server must not take the trainer's place in the trainer's process group.
_RANK = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class NoServerEnvironment(RuntimeError):
    """There is no interpreter with SGLang; the message says how to get one."""


class ServerDidNotStart(GenerationError):
    """The server ended or was not healthy in time; the message ends with the last lines of its log."""


def server_python(device: str = "cpu") -> Path:
    """The interpreter that ARBORIST_SGLANG_PYTHON names, else the one that `make sglang` built.

    Raises:
        NoServerEnvironment: there is neither, or only the latter and the device is "cuda".
    """
    named = os.environ.get(_PYTHON_VARIABLE)
    if named:
        python = Path(named)
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise NoServerEnvironment(
                f"{_PYTHON_VARIABLE}: '{named}' is no interpreter; name bin/python of an environment"
            )
        return python.absolute()  # not resolved: bin/python is a link, and its place names the environment
    if device == "cuda":
        raise NoServerEnvironment(
            f"servers on GPUs need an environment of their own (what `make sglang` builds is for CPUs): set"
            f" {_PYTHON_VARIABLE} to the python of one with sglang for CUDA, or launch.device (--device) to cpu"
        )
    if not (_ENVIRONMENT / ".installed").exists():
        raise NoServerEnvironment(
            f"no environment with SGLang: run `make sglang` (CPU), or set {_PYTHON_VARIABLE} to the python of an"
            " environment with sglang installed (GPU)"
        )
    return _ENVIRONMENT / "bin" / "python"


# Where a server listens and which key it wants is decided here. A key on a command line is seen by every user of the
# machine; a configuration file of SGLang may set all of them.
_OURS = ("--host", "--port", "--api-key", "--admin-api-key", "--config")


def refused_argument(arguments: Sequence[str]) -> str | None:
    """What is wrong with more arguments for SGLang; None for nothing. Its parser takes beginnings of names, too."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if len(name) > 2 and (ours := next((one for one in _OURS if one.startswith(name)), None)):
            return (
                f"{name} ({ours}) would change where the server listens or which key it wants; only `arborist serve"
                f" --host` and --port open it, and the key comes from {API_KEY_VARIABLE}"
            )
    return None


@dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    Attributes:
        model_path: directory written by `save_pretrained`.
        host: address to listen on; anything but loopback opens it to the network.
        port: 0 takes a free one.
        device: "cuda" or "cpu".
        dtype: of its weights: "float32", "bfloat16", "float16" or "auto": on a CPU the model's, on a GPU SGLang's
            choice, which is the model's but for float32: that it serves in half precision.
        context: most tokens of one request, prompt and output together; None for the model's own limit.
        max_running_requests: most requests decoding together; None leaves it to SGLang.
        kv_cache_tokens: size of its key-value cache; None leaves it to SGLang on a GPU, 65,536 on CPU (SGLang would
            take most of the machine's memory).
        gpu: its first GPU, of `tensor_parallel` ones.
        tensor_parallel: GPUs of one server.
        num_threads: CPU threads of an operation; None leaves torch's default.
        seed: of its sampling.
        label: of the weights in `model_path`, as they are to be told apart; None for weights that no run gave.
        chat: it has the model's tokenizer and speaks Chat Completions under /v1 beside token ids; rollouts send these
            alone and start faster without.
        in_turns: it can give up its GPU's memory, and keeps its weights in the host's while it has; on a CPU it obeys,
            and frees nothing.
        arguments: more arguments for SGLang, as on its command line.

    Raises:
        ValueError: arguments that say where the server listens or which key it wants.
    """

    model_path: str
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    context: int | None = None
    max_running_requests: int | None = None
    kv_cache_tokens: int | None = None
    gpu: int = 0
    tensor_parallel: int = 1
    num_threads: int | None = None
    seed: int = 0
    label: str | None = None
    chat: bool = False
    in_turns: bool = False
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problem := refused_argument(self.arguments):
            raise ValueError(f"arguments: {problem}")

    @property
    def weights_dtype(self) -> str | None:
        """What `dtype` says, or the model's configuration where that is "auto"; None where neither can be known."""
        if self.dtype != "auto":
            return self.dtype
        try:
            config = json.loads((Path(self.model_path) / "config.json").read_text())
        except (OSError, ValueError):  # a name on the hub; or the server says what is wrong with it
            return None
        dtype = config.get("dtype") or config.get("torch_dtype")
        return _SERVED.get(dtype) if isinstance(dtype, str) else None

    def command(self, port: int) -> list[str]:
        """SGLang's arguments."""
        tokens = self.kv_cache_tokens or (65536 if self.device == "cpu" else None)
        given: dict[str, object] = {
            "--model-path": self.model_path,
            "--host": self.host,
            "--port": port,
            "--device": self.device,
            # Its own "auto" is half precision where the model is in float32.
            "--dtype": (self.device == "cpu" and self.weights_dtype) or self.dtype,
            "--random-seed": self.seed,
            "--weight-version": self.label,
            # It refuses a prompt six tokens before this, and ends an output one token before it.
            "--context-length": None if self.context is None else self.context + 6,
            "--max-running-requests": self.max_running_requests,
            "--max-total-tokens": tokens,
            "--log-level-http": "warning",  # not a line for every request
        }
        if self.device == "cpu":
            given |= {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
        else:
            given |= {"--base-gpu-id": self.gpu, "--tp-size": self.tensor_parallel}
        flags = [str(part) for name, value in given.items() if value is not None for part in (name, value)]
        ids = [] if self.chat else ["--skip-tokenizer-init"]  # token ids in and out
        if self.in_turns and self.device != "cpu":
            ids += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        # Reports hold what is new only; an idle scheduler does not spin.
        return [*flags, *ids, "--incremental-streaming-output", "--sleep-on-idle", *self.arguments]


class ServerProcess:
    """One server of ours: `start()`, `await ready(...)`, `stop()`, and again.

    Args:
        options: how it runs.
        log_file: what it writes goes to the end of this file.
        api_key: callers need it; passed in the environment.
        belongings: a directory that the server removes when this process is killed (`stop` leaves it to the caller).
    """

    def __init__(
        self, options: ServerOptions, log_file: Path, api_key: str | None = None, belongings: Path | None = None
    ) -> None:
        self.options = options
        self.log_file = log_file
        self._key = api_key
        self._belongings = belongings
        self._files: set[Path] = set()  # in shared memory: a server that was killed cannot be asked any more
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._scratch = ""
        self._log_from = 0
        self.port = 0

    @property
    def url(self) -> str:
        host = self.options.host
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> bool:
        """It ended by itself; `stop` cleans up after it."""
        return self._process is not None and self._process.poll() is not None

    @property
    def ending(self) -> str:
        """How a process that ended did, in words: its code, or the signal that killed it."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return "its process ended"
        name = _SIGNALS.get(-code, f"signal {-code}")
        return f"its process ended with code {code}" if code >= 0 else f"its process was killed ({name})"

    def client(self) -> ServerClient:
        return ServerClient(self.url, self._key)

    def start(self) -> None:
        """Starts the process and returns at once. Raises NoServerEnvironment."""
        assert self._process is None, "stop() comes before another start()"
        python = server_python(self.options.device)
        self.port = self.options.port or _free_port(self.options.host)
        self._scratch = tempfile.mkdtemp(prefix="arborist-sglang-")  # short: it holds sockets
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with self.log_file.open("ab") as log:
                self._log_from = log.tell()
                self._process = subprocess.Popen(
                    [str(python), str(_MAIN), str(read_end), *self.options.command(self.port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    pass_fds=(read_end,),
                    start_new_session=True,  # a process group of its own, out of reach of the terminal's Ctrl-C
                )
        except BaseException:
            os.close(self._lifeline)
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        finally:
            os.close(read_end)

    async def ready(self, deadline_s: float) -> None:
        """Starts it if need be and returns when /health answers.

        Raises:
            ServerDidNotStart: it ended, or did not answer within `deadline_s` seconds; it is stopped then.
        """
        for attempt in range(_ATTEMPTS):
            if self._process is None:
                self.start()
            try:
                await self._healthy(deadline_s)
                return
            except ServerDidNotStart as error:
                await asyncio.to_thread(self.stop, 0.0)
                if "address already in use" not in str(error).lower() or self.options.port:
                    raise
                if attempt == _ATTEMPTS - 1:
                    raise
            except BaseException:
                await asyncio.to_thread(self.stop, 0.0)
                raise

    async def _healthy(self, deadline_s: float) -> None:
        process = self._process
        assert process is not None
        client, ends = self.client(), awake() + deadline_s
        try:
            while not await client.alive(max(0.5, min(5.0, ends - awake()))):
                self._files |= leftovers.shared_memory(process.pid)  # one that ends now leaves them
                code = process.poll()
                if code is not None:
                    raise ServerDidNotStart(f"the SGLang server ended with code {code} while starting; {self.tail()}")
                if awake() > ends:
                    raise ServerDidNotStart(
                        f"the SGLang server at {self.url} was not healthy within {deadline_s:g} s; {self.tail()}"
                    )
                await asyncio.sleep(_HEALTH_POLL_S)
            self._files |= leftovers.shared_memory(process.pid)
        finally:
            await client.close()

    def stop(self, grace_s: float = 15.0) -> None:
        """Ends it: SIGTERM, and after `grace_s` seconds (or at once for 0) SIGKILL for its whole group. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        files, self._files = self._files | leftovers.shared_memory(process.pid), set()
        if grace_s > 0 and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        began = time.monotonic()
        while leftovers.members(process.pid) and (waited := time.monotonic() - began) < _END_S:
            leftovers.kill(process.pid, trackers=waited > _END_S / 2)
            time.sleep(0.02)
        process.wait(_END_S)
        os.close(self._lifeline)
        leftovers.remove(files)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def tail(self) -> str:
        """Where its log is, and the last lines of this start."""
        try:
            with self.log_file.open("rb") as log:
                log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:
            return f"its log cannot be read: {error}"
        shown = "\n".join(f"    {line[:400]}" for line in lines)
        return f"the end of {self.log_file}:\n{shown}" if lines else f"its log {self.log_file} is empty"

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in _RANK}
        own |= {
            "TMPDIR": self._scratch,
            "ARBORIST_SGLANG_SCRATCH": os.pathsep.join(
                [self._scratch, *([str(self._belongings)] if self._belongings else [])]
            ),
            "ARBORIST_SGLANG_DEVICE": self.options.device,
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health hangs during a pause
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the margin in --context-length
            "PYTHONUNBUFFERED": "1",
        }
        if dtype := self.options.weights_dtype:
            own.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)  # else convolutions of any model remember in bfloat16
        own.pop(API_KEY_VARIABLE, None)
        if own.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True":  # the trainer's; torch_memory_saver refuses it
            del own["PYTORCH_ALLOC_CONF"]
        if self._key:
            own[API_KEY_VARIABLE] = self._key
        if self.options.num_threads is not None:
            own["OMP_NUM_THREADS"] = str(self.options.num_threads)
        return own


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
