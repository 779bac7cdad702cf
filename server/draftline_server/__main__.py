"""The command line: `draftline-server serve`, `generate`, `fetch`, `preflight`, `plan` and `distill`."""

from __future__ import annotations

import argparse
import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from draftline_server import __version__
from draftline_server.allocator import keep_freed_memory
from draftline_server.config import Config, load_config, parse_config, with_overrides
from draftline_server.errors import ConfigError, FetchError, ResourceError, StartupError
from draftline_server.log import configure_logging, log_failure

if TYPE_CHECKING:
    from draftline_server.preflight import Findings

EXIT_FAILED = 1
EXIT_STARTUP = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

_logger = logging.getLogger(__name__)

# Flag of `serve`, key that it overrides, type, help.
Override = tuple[str, str, Callable[[str], Any], str]
_OVERRIDES: tuple[Override, ...] = (
    ("--host", "server.host", str, "address to listen on"),
    ("--grpc-port", "server.grpc_port", int, "gRPC port; 0 takes a free one and logs it"),
    ("--admin-port", "server.admin_port", int, "port of /metrics, /healthz and /readyz; 0 takes a free one"),
    ("--device", "device", str, "auto, cpu or cuda"),
    ("--max-context-length", "inference.max_context_length", int, "prompt and output together, in tokens"),
    ("--kv-cache-memory", "inference.kv_cache_memory", str, "size of the KV cache, such as 4GiB"),
    (
        "--num-speculative-tokens",
        "speculative_decoding.num_speculative_tokens",
        int,
        "longest draft; 0 switches speculation off",
    ),
    ("--log-level", "observability.log_level", str, "debug, info, warning or error"),
    ("--log-format", "observability.log_format", str, "json or text"),
)

# Of `plan`: what has no say in the memory is left out.
_PLAN_OVERRIDES = tuple(override for override in _OVERRIDES if not override[1].startswith("server."))

# Flag of `generate`, field of SamplingParams, type, help.
_SAMPLING: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("--max-tokens", "max_tokens", int, "most tokens to generate"),
    ("--min-tokens", "min_tokens", int, "no end before so many tokens"),
    ("--temperature", "temperature", float, "0 is greedy"),
    ("--top-p", "top_p", float, "nucleus sampling"),
    ("--top-k", "top_k", int, "keep the k most probable tokens"),
    ("--min-p", "min_p", float, "keep tokens of at least so many times the highest probability"),
    ("--repetition-penalty", "repetition_penalty", float, "of tokens in prompt or output"),
    ("--frequency-penalty", "frequency_penalty", float, "of tokens in the output, per occurrence"),
    ("--presence-penalty", "presence_penalty", float, "of tokens in the output"),
    ("--seed", "seed", int, "the same seed gives the same text"),
)


# Flag of `distill`, type, default, help.
_DISTILL: tuple[tuple[str, Callable[[str], Any], Any, str], ...] = (
    ("--num-dialogues", int, 4096, "dialogues to make up"),
    ("--max-answer-tokens", int, 256, "longest answer"),
    ("--draft-vocab-size", int, 8192, "tokens that the head may propose"),
    ("--unrolled-steps", int, 4, "tokens that it learns to draft in a row"),
    ("--batch-size", int, 8, "dialogues of a training step"),
    ("--seed", int, 0, "decides everything that is drawn"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STARTUP
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as all other faults of a start are said."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_STARTUP, f"error: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="draftline-server",
        description="Serves a target model over gRPC, sped up by speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=f"draftline-server {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_generate(commands)
    _add_fetch(commands)
    _add_preflight(commands)
    _add_plan(commands)
    _add_distill(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model pair",
        description="Serves a target model and, if there is one, a draft model. Settings come from a YAML "
        "file, or are the defaults with --target; flags override single keys of either.",
        epilog="Exit codes: 0 drained after SIGTERM or Ctrl-C; 1 the engine failed; 2 it could not start; "
        "130 a second Ctrl-C ended it at once.",
    )
    parser.set_defaults(run=_serve)
    _add_configuration(parser, _OVERRIDES)


def _add_configuration(parser: argparse.ArgumentParser, overrides: Sequence[Override]) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    source.add_argument("--target", metavar="DIR", help="directory of the target model")
    parser.add_argument("--draft", metavar="DIR", help="directory of the draft model; only with --target")
    for flag, key, kind, text in overrides:
        parser.add_argument(flag, dest=key, type=kind, metavar="VALUE", help=f"{text} ({key})")


def _add_generate(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="stream a completion from a running server",
        description="Streams one completion to stdout; statistics go to stderr when it is complete. "
        "Without --prompt the prompt is read from stdin.",
    )
    parser.set_defaults(run=_generate)
    parser.add_argument("--address", default="localhost:50051", help="host:port (default: %(default)s)")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's chat message")
    parser.add_argument(
        "--no-speculation", action="store_true", help="decode with the target alone (the same output, slower)"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so many seconds")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    for flag, name, kind, text in _SAMPLING:
        parser.add_argument(flag, dest=name, type=kind, metavar="VALUE", help=text)


def _add_fetch(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "fetch",
        help="bring a model's files into a directory",
        description="Brings a model's files into a directory, verifies them and leaves a manifest with their "
        "hashes. A directory that holds the model already is left alone; what was interrupted goes on where "
        "it ended. Prints the model's digest; progress is in the log (stderr).",
        epilog="URI: hf://ORG/NAME (HF_TOKEN, HF_ENDPOINT), s3://BUCKET/PREFIX (AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and so on), file:///PATH or a path. The directory itself as "
        "a path: its files are verified in place. Exit codes: 0 the model is there; 2 it could not be "
        "fetched; 143 ended by SIGTERM.",
    )
    parser.set_defaults(run=_fetch)
    parser.add_argument("uri", metavar="URI", help="where the model is")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="the directory")
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of hf://; of others a name for their state"
    )
    parser.add_argument("--digest", metavar="sha256:HEX", help="what the files must hash to")
    parser.add_argument("--log-format", choices=("json", "text"), default="json", help="default: %(default)s")


def _add_preflight(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "preflight",
        help="check whether a model pair may be served",
        description="Checks everything that a start checks before it loads weights: configuration, files, "
        "digests, tokenizers, context lengths, memory. Writes the result as JSON, whatever it is.",
        epilog="Exit codes: 0 the pair may be served; 2 it may not.",
    )
    parser.set_defaults(run=_preflight)
    parser.add_argument(
        "--config", type=Path, metavar="FILE", required=True, help="configuration file (YAML)"
    )
    parser.add_argument("--result", type=Path, metavar="FILE", required=True, help="where the result goes")
    _add_accelerator_memory(parser)


def _add_plan(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show how much memory a model pair needs",
        description="Prints the memory plan of a model pair: weights, working memory, KV cache, how many "
        "requests of full length it holds, and what would make it fit where it does not.",
        epilog="Exit codes: 0 it fits, or the memory is not known; 2 it does not fit or cannot be served.",
    )
    parser.set_defaults(run=_plan)
    _add_configuration(parser, _PLAN_OVERRIDES)
    _add_accelerator_memory(parser)


def _add_distill(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "distill",
        help="make a draft head for a target model",
        description="Trains a small head that drafts for one target (EAGLE-3): the target answers prompts, "
        "its hidden states are kept, a head learns from both and is measured on prompts held out. The result "
        "is a directory for --draft, with a README of what it is worth. What was interrupted goes on where "
        "it ended when the command is given again.",
        epilog="Prompts: a text file with a prompt a line, or .jsonl with objects that have prompt or "
        "messages. Without any, the target makes up the dialogues. Exit codes: 0 the head is there; 2 it "
        "cannot be made; 130 interrupted.",
    )
    parser.set_defaults(run=_distill)
    parser.add_argument("--target", type=Path, metavar="DIR", required=True, help="the target model")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where the head goes")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="what is kept in between (default: OUT.work)"
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--prompts", type=Path, metavar="FILE", help="prompts for the target to answer")
    data.add_argument(
        "--dialogues",
        type=Path,
        metavar="FILE",
        nargs="+",
        default=(),
        help="texts of the target, from earlier runs",
    )
    for flag, kind, default, text in _DISTILL:
        parser.add_argument(
            flag, type=kind, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument("--minutes", type=float, metavar="N", help="time to train for (default: 60)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps to train for, instead of minutes")
    parser.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=60.0,
        metavar="N",
        help="training time that a kill may cost (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", metavar="I,J,K", help="hidden states that it reads; the last one is the final"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s"
    )


def _add_accelerator_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accelerator-memory",
        metavar="BYTES",
        help="plan for a GPU of this memory, such as 80GiB, which need not be here",
    )


def _serve(arguments: argparse.Namespace) -> int:
    config = _read_config(arguments)
    # Before torch is loaded, which reads it once. A thread that spins while it waits for another may keep
    # that one from its CPU: beside busy neighbours a step then takes many times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    keep_freed_memory()
    configure_logging(level=config.observability.log_level, log_format=config.observability.log_format)
    try:
        with _ended_by_sigterm(0):  # there is nothing to drain before the server has its own handler
            # Imported late: gRPC takes a moment, which --help and a wrong key should not cost.
            from draftline_server.app import load_pair, run

            return run(config, load_pair)
    except StartupError:
        raise
    except Exception as error:
        log_failure(_logger, "server failed", error)
        return EXIT_FAILED


def _fetch(arguments: argparse.Namespace) -> int:
    configure_logging(level="info", log_format=arguments.log_format)
    if arguments.digest is not None and not re.fullmatch("sha256:[0-9a-f]{64}", arguments.digest):
        raise FetchError("--digest: must be sha256: and 64 hexadecimal digits")
    from draftline_server.fetch.fetching import fetch_model

    with _ended_by_sigterm():
        try:
            fetched = fetch_model(
                arguments.uri, arguments.out, revision=arguments.revision, digest=arguments.digest
            )
        except StartupError:
            raise
        except Exception as error:
            log_failure(_logger, "fetch failed", error)
            return EXIT_FAILED
    print(fetched.model)
    return 0


def _preflight(arguments: argparse.Namespace) -> int:
    configure_logging(level="info", log_format="json")
    from draftline_server.preflight import run_checks, write_result

    with _ended_by_sigterm():
        findings = run_checks(lambda: load_config(arguments.config), arguments.accelerator_memory)
        try:
            write_result(findings, arguments.result)
        except OSError as error:
            raise ResourceError(f"--result: {arguments.result}: {error.strerror}") from error
    return _show_findings(findings)


def _plan(arguments: argparse.Namespace) -> int:
    from draftline_server.preflight import run_checks

    return _show_findings(run_checks(lambda: _read_config(arguments), arguments.accelerator_memory))


def _distill(arguments: argparse.Namespace) -> int:
    settings = _distill_settings(arguments)
    from draftline_server.distill.pipeline import distill

    evaluation = distill(settings)
    for line in evaluation.summary():
        print(line)
    return 0


def _distill_settings(arguments: argparse.Namespace) -> Any:
    """Raises `ConfigError`."""
    if arguments.steps is not None and arguments.minutes is not None:
        raise ConfigError("--steps: not with --minutes")
    for flag in (*(flag for flag, *_ in _DISTILL), "--minutes", "--steps"):
        value = getattr(arguments, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value < (0 if flag == "--seed" else 1e-9):
            raise ConfigError(f"{flag}: must be above 0, not {value}")
    try:
        layers = tuple(int(part) for part in arguments.layers.split(",")) if arguments.layers else None
    except ValueError as error:
        raise ConfigError(f"--layers: numbers with commas between, not {arguments.layers!r}") from error
    from draftline_server.distill.pipeline import DistillSettings
    from draftline_server.distill.training import TrainingSettings
    from draftline_server.model.device import resolve_device

    out = arguments.out.resolve()
    minutes = 60.0 if arguments.minutes is None and arguments.steps is None else arguments.minutes
    return DistillSettings(
        target=arguments.target,
        out=out,
        work=arguments.work.resolve() if arguments.work else out.with_name(f"{out.name}.work"),
        prompts=arguments.prompts,
        dialogues=tuple(arguments.dialogues),
        num_dialogues=arguments.num_dialogues,
        max_answer_tokens=arguments.max_answer_tokens,
        layer_ids=layers,
        draft_vocab_size=arguments.draft_vocab_size,
        device=resolve_device(arguments.device),
        training=TrainingSettings(
            steps=arguments.steps,
            minutes=minutes,
            unrolled_steps=arguments.unrolled_steps,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            checkpoint_seconds=arguments.checkpoint_seconds,
        ),
        command=shlex.join(["draftline-server", *sys.argv[1:]]),
    )


def _show_findings(findings: Findings) -> int:
    from draftline_server.preflight import summarize

    for line in summarize(findings):
        print(line)
    if findings.fault is None:
        return 0
    print(f"error: {findings.fault.message}", file=sys.stderr)
    return EXIT_STARTUP


@contextmanager
def _ended_by_sigterm(exit_code: int = EXIT_TERMINATED) -> Iterator[None]:
    """The first process of a container is not ended by a signal that it does not handle.

    At once, as a kill does, which loses nothing: what has come is continued by the next run. Whoever puts
    another handler in this one's place has the last word.
    """

    def end(*_: object) -> None:
        os._exit(exit_code)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, before)


def _read_config(arguments: argparse.Namespace) -> Config:
    overrides = {key: getattr(arguments, key, None) for _, key, _, _ in _OVERRIDES}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if arguments.config is not None:
        if arguments.draft is not None:
            raise ConfigError("--draft: only with --target; with --config set models.draft_model.path")
        return load_config(arguments.config, overrides)
    models = {"target_model": {"path": arguments.target}}
    if arguments.draft is not None:
        models["draft_model"] = {"path": arguments.draft}
    return parse_config(with_overrides({"models": models}, overrides))


def _generate(arguments: argparse.Namespace) -> int:
    from draftline_server.rpc.client import (
        CallFailedError,
        CompletionOptions,
        describe_summary,
        stream_completion,
    )

    prompt = arguments.prompt if arguments.prompt is not None else _read_stdin()
    sampling = {name: getattr(arguments, name) for _, name, _, _ in _SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    options = CompletionOptions(
        prompt=prompt,
        is_chat=arguments.chat,
        sampling={**sampling, "stop": arguments.stop, "ignore_eos": arguments.ignore_eos},
        use_speculation=not arguments.no_speculation,
        timeout_seconds=arguments.timeout,
    )
    shown: list[str] = []
    try:
        summary = stream_completion(arguments.address, options, lambda text: _show(text, shown))
    except CallFailedError as error:
        _end_line(shown)
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    _end_line(shown)
    print(f"[{describe_summary(summary)}]", file=sys.stderr)
    return 0


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not {error.encoding} text (byte {error.start})") from error


def _show(text: str, shown: list[str]) -> None:
    if text:
        shown[:] = [text]
    sys.stdout.write(text)
    sys.stdout.flush()


def _end_line(shown: list[str]) -> None:
    """Ends the line of a text that does not end with one, so that what follows has its own."""
    if shown and not shown[0].endswith("\n"):
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
