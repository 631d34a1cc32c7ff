"""One training run on this machine, from a checked configuration to its summary: what `rollmill train` and a pipeline's rl stage call."""

from __future__ import annotations

from rollmill.config import RunConfig
from rollmill.fleet.display import Display
from rollmill.fleet.local import RoleFailed, Supervisor
from rollmill.fleet.rundir import hold, prepare
from rollmill.fleet.summary import write_summary
from rollmill.fleet.validate import check_inputs


def train_run(config: RunConfig, *, resume: bool) -> bool:
    """Whether the last step was reached; False when a person stopped it, and nothing is lost."""
    check_inputs(config)
    with hold(config.run.dir, "run"):
        resolved = prepare(config, resume=resume)
        with Display(config) as display:
            supervisor = Supervisor(config, resolved, say=display.say, tick=display.tick)
            try:
                is_finished = supervisor.run()
            except RoleFailed as failure:
                raise ValueError(f"{failure}\n(whole logs: {config.run.dir}/logs; go on with --resume once it is mended)") from failure
        write_summary(config.run.dir)
    return is_finished
