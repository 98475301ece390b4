"""``ds_lgamp run`` of a DeepSpeed script, unedited: with the engine installed or, for ``--explain``, up to
``deepspeed.initialize`` on imagined ranks."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from ds_lgamp.config import BLOCK, ConfigError, read_block
from ds_lgamp.integrations.cluster_file import with_speeds
from ds_lgamp.integrations.deepspeed.config.check_keys import check_keys, without_auto
from ds_lgamp.integrations.deepspeed.hook.deepspeed_seams import check_seams
from ds_lgamp.integrations.user_script import failures_end_the_process, leave, run_as_main

# These need a DeepSpeed that check_seams accepts, so functions import them.
if TYPE_CHECKING:
    from ds_lgamp.integrations.deepspeed.explain.facts import Explanation, LaidOut

LayOut = Callable[[dict[str, Any]], "LaidOut"]
STOCK_REFUSAL = "must divide distributed world size"
"""Words of PipelineModule's own error for a number of stages that does not divide the number of ranks."""


def run_script(
    script: str, arguments: Sequence[str], measure: str | None = None, keys: dict[str, Any] | None = None
) -> NoReturn:
    """Runs ``script`` as ``__main__``, and ends the process with it.

    Args:
        measure: the file for losses, times, traffic and memory; None measures nothing.
        keys: what takes the place of keys of the block.
    """
    with failures_end_the_process(STOCK_REFUSAL):
        check_seams()
        check_config(arguments)
        # These imports fail with a DeepSpeed that check_seams refuses.
        from ds_lgamp.integrations.deepspeed.engine.monitor import TrainingMeasurement
        from ds_lgamp.integrations.deepspeed.hook.initialize import (
            compile_no_collective,
            install,
            pipeline_engine,
            plain_engine,
            with_keys,
        )
        from ds_lgamp.integrations.deepspeed.hook.notice import notice_blocks

        compile_no_collective()
        if keys:
            install(with_keys(pipeline_engine, keys), with_keys(plain_engine, keys))
        else:
            notice_blocks()
        measurement = TrainingMeasurement()
        if measure is not None:
            measurement.install()
        run_as_main(script, arguments)
        if measure is not None:
            measurement.write(Path(measure))
    leave()


def check_config(arguments: Sequence[str]) -> None:
    """Checks the file that ``--deepspeed_config`` on the command line names, before anything starts; also that of
    ``--deepspeed``, which is an option of transformers' Trainer and a flag of other scripts.

    Raises ConfigError if the file cannot be read, or if its block is enabled and faulty.
    """
    for index, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        value = value or next(iter(arguments[index + 1 : index + 2]), "")
        if name == "--deepspeed_config":
            config = _read_config(name, value)
            if read_block(config) is not None:
                check_keys(config)
        elif name == "--deepspeed" and Path(value).is_file():
            config = _read_config(name, value)
            if read_block(config) is not None:
                check_keys(without_auto(config))


def _read_config(name: str, value: str) -> dict[str, Any]:
    """The configuration as DeepSpeed reads it: a file of JSON or HJSON, or base64."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    try:
        config = load_ds_config(value)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {value} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{name} {value} holds {type(config).__name__}; it must hold an object")
    return config


def explain_script(
    script: str, arguments: Sequence[str], ranks: int | None, as_json: bool, output: TextIO, lay_out: LayOut | None
) -> int:
    """Runs ``script`` in this process alone up to ``deepspeed.initialize``, writes to ``output`` what the block would
    do, and returns the exit status. No engine is built.

    Args:
        ranks: the number of ranks to imagine; None takes ``WORLD_SIZE``, else 1.
        as_json: writes JSON instead of text.
        lay_out: returns where the ranks of what is explained go, to be written too; may raise ConfigError.
    """
    world_size = ranks if ranks is not None else int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if rank >= world_size:
        return 0
    hint = (
        f"ds_lgamp: the script failed before deepspeed.initialize; it ran on {world_size} imagined ranks (--ranks), "
        "whose collectives move nothing\n"
    )
    with failures_end_the_process(STOCK_REFUSAL, hint):
        check_seams()
        check_config(arguments)
        from ds_lgamp.integrations.deepspeed.explain.imagined import imagine_ranks
        from ds_lgamp.integrations.deepspeed.hook.initialize import compile_no_collective, install

        explainer = _Explainer(output if rank == 0 else None, as_json, lay_out)
        compile_no_collective()
        imagine_ranks(world_size, rank)
        install(explainer.explain_pipeline, explainer.explain_plain)
        try:
            run_as_main(script, arguments)
        except (Exception, SystemExit):
            # The script cannot go on without an engine. Once the explanation is written, its errors do not matter.
            if not explainer.done:
                raise
        if not explainer.done:
            raise ConfigError(f"{script} ended without initialising an engine with a {BLOCK} block: nothing to explain")
    return 0


class _Explainer:
    """Takes the place of the builders of engines, writes to ``output`` if that is given, and ends the script."""

    def __init__(self, output: TextIO | None, as_json: bool, lay_out: LayOut | None) -> None:
        self._output, self._as_json, self._lay_out = output, as_json, lay_out
        self.done = False

    def explain_pipeline(self, _stock: Any, **arguments: Any) -> NoReturn:
        from ds_lgamp.integrations.deepspeed.explain.explain import explain
        from ds_lgamp.integrations.deepspeed.hook.initialize import partition_method_of

        method = partition_method_of(arguments["model"])

        def facts_of(filled: dict[str, Any]) -> "Explanation":
            return explain({**arguments, "config": filled}, method)

        self._explain(facts_of, arguments["config"], replicas=True)

    def explain_plain(self, stock: Any, **arguments: Any) -> Any:
        from ds_lgamp.integrations.deepspeed.explain.explain import enabled_block, explain_plain
        from ds_lgamp.integrations.deepspeed.plain.build import only_evaluates

        if only_evaluates(arguments):
            return stock(**arguments)

        def facts_of(filled: dict[str, Any]) -> "Explanation":
            return explain_plain(enabled_block(filled), {**arguments, "config": filled})

        self._explain(facts_of, arguments["config"], replicas=False)

    def _explain(
        self, facts_of: Callable[[dict[str, Any]], "Explanation"], config: dict[str, Any], replicas: bool
    ) -> NoReturn:
        """Writes the facts of ``config``, with the speeds of where its ranks go. Facts are made on all ranks, because
        they may be refused."""
        facts = facts_of(config)
        if self._output is not None:
            laid_out = None if self._lay_out is None else self._lay_out(facts.as_data())
            filled = config if laid_out is None else with_speeds(config, laid_out.assignment, replicas)
            if self._lay_out is not None and laid_out is not None and filled != config:
                # The same order, with the work that follows from it.
                facts = facts_of(filled)
                laid_out = self._lay_out({**facts.as_data(), "order": laid_out.assignment.order})
            self._output.write(self._text(facts, laid_out))
            self._output.flush()
        self.done = True
        raise SystemExit(0)

    def _text(self, facts: "Explanation", laid_out: "LaidOut | None") -> str:
        from ds_lgamp.integrations.deepspeed.explain.facts import assigned_json, assigned_text
        from ds_lgamp.integrations.deepspeed.explain.text import as_text

        if self._as_json:
            assignment = {} if laid_out is None else {"assignment": assigned_json(laid_out)}
            return json.dumps(facts.as_data() | assignment) + "\n"
        parts = [as_text(facts), *([] if laid_out is None else [assigned_text(laid_out)])]
        return "\n\n".join(parts) + "\n"
