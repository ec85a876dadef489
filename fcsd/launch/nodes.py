"""A run on several nodes: the command that each of them must run, or the Slurm script that runs them."""

import re
import shlex
import sys
from dataclasses import dataclass

from fcsd.config import ResolvedRecipe
from fcsd.errors import ConfigError

PORT = 29400
GRACE = 120  # seconds between the signal and the time limit
_ENDPOINT = re.compile(r"(?P<host>[\w.-]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Node:
    """One node among those of a run.

    Attributes:
        rank: 0 for the node whose address is ``host``.
    """

    count: int
    rank: int
    host: str
    port: int

    @property
    def meeting(self) -> tuple[str, int]:
        """Where the nodes meet: an address of node 0, and a port that is free there."""
        return self.host, self.port

    def torchrun(self) -> list[str]:
        """Options of torchrun that make its processes those of this node."""
        where = [f"--master-addr={self.host}", f"--master-port={self.port}"]
        return [f"--nnodes={self.count}", f"--node-rank={self.rank}", *where]


def node_of(count: int, rank: int, rendezvous: str | None) -> Node:
    """This node, from ``--nodes``, ``--node-rank`` and ``--rendezvous HOST:PORT``.

    Raises:
        ConfigError: they do not go together.
    """
    match = _ENDPOINT.fullmatch(rendezvous or "")
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(f"--rendezvous {rendezvous}: expected HOST:PORT", hint="of node 0, the same on every node")
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank {rank}: {count} nodes are numbered 0 to {count - 1}")
    return Node(count, rank, match["host"], int(match["port"]))


def node_commands(arguments: list[str], nodes: int, rendezvous: str | None) -> str:
    """What each node must run, one line per node.

    Args:
        arguments: the command line that asked for it, ``--nodes`` included.
        rendezvous: ``HOST:PORT`` of node 0; None leaves its name open.
    """
    meet = rendezvous or f"HOST_OF_NODE_0:{PORT}"
    run = [*_fcsd(), *arguments, *([] if rendezvous else ["--rendezvous", meet])]
    lines = [f"# node {rank}\n{shlex.join([*run, '--node-rank', str(rank)])}" for rank in range(nodes)]
    return "\n".join(lines)


def slurm_script(resolved: ResolvedRecipe, *, nodes: int, gpus: int, options: list[str], grace: int = GRACE) -> str:
    """A batch script that runs exactly this recipe or sweep, which it carries with every ``--set`` worked in.

    Slurm sends SIGUSR1 ``grace`` seconds before the time limit, and SIGTERM when it preempts the job; the run saves and
    ends with 143, upon which the script puts itself back into the queue and later resumes.

    Args:
        options: of ``fcsd distill``, for the run.
    """
    name, run = resolved.recipe.name, shlex.quote(resolved.recipe.output_dir)
    if resolved.recipe.sweep is None:
        logs = [f"--output={name}-%j-%t.log", "--open-mode=append"]
        start = f'{shlex.join(srun(nodes, gpus, options, logs=logs, grace=grace))} "$recipe"'
    else:  # starts a job step for each of its runs
        several = ["--gpus", str(gpus), "--nodes", str(nodes), *options]
        start = f'{shlex.join([*_fcsd(), "distill", *several])} --sweep "$recipe"'
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
#SBATCH --signal=USR1@{grace}
# Add what your cluster needs: --partition, --account, --time.
set -u

mkdir -p {run}
recipe={run}/submitted.yaml
cat > "$recipe" <<'END_OF_RECIPE'
{resolved.to_yaml().rstrip()}
END_OF_RECIPE

host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export host port

{start}
code=$?
if [ "$code" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def srun(nodes: int, gpus: int, options: list[str], *, logs: list[str], grace: int = GRACE) -> list[str]:
    """A job step with one task a node, which starts the node's processes; what it lacks is the recipe's path.

    The script's ``host`` and ``port`` must be in the environment. The last nodes may take as long to save as the first.
    """
    run = shlex.join([*_fcsd(), "distill", "--gpus", str(gpus), "--nodes", str(nodes), *options])
    task = f'exec {run} --node-rank "$SLURM_NODEID" --rendezvous "$host:$port" "$0"'
    return ["srun", "--kill-on-bad-exit=0", f"--wait={grace}", *logs, "bash", "-c", task]


def _fcsd() -> list[str]:
    return [sys.executable, "-m", "fcsd"]
