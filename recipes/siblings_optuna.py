"""An Optuna study whose trials are siblings: two torchrun jobs at a time on the same devices.

    pip install optuna
    python recipes/siblings_optuna.py --trials 12

Trials are pruned by their losses. The study is kept in SQLite: the same command adds trials to it.
A trial that is pruned or fails does not disturb the others.
"""

import argparse
import os
import re
import subprocess
from pathlib import Path

import optuna

# It prints "epoch 0: loss 0.1" after each epoch.
SCRIPT = Path(__file__).with_name("minimal_crossover.py")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument(
        "--at-once", type=int, default=2, help="siblings; the devices' memory must hold all"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", default="sqlite:///siblings.db")
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    os.environ.setdefault("CROSSOVER_GROUP", f"study-{os.getpid()}")  # one name for all: siblings

    def train(trial: optuna.Trial) -> float:
        lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        words = ["torchrun", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
        words += ["--lr", str(lr), "--epochs", str(args.epochs)]
        loss = float("nan")
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
            for line in job.stdout or ():
                if found := re.match(r"epoch (\d+): loss (\S+)", line):
                    loss = float(found[2])
                    trial.report(loss, int(found[1]))
                    if trial.should_prune():
                        job.terminate()  # torchrun ends its ranks
                        raise optuna.TrialPruned
        subprocess.CompletedProcess(words, job.returncode).check_returncode()
        return loss

    study = optuna.create_study(
        storage=args.storage,
        study_name="siblings",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=args.seed),
    )
    study.optimize(train, args.trials, n_jobs=args.at_once, catch=subprocess.CalledProcessError)
    print(f"best: {study.best_value:.4f} with {study.best_params}")


if __name__ == "__main__":
    main()
