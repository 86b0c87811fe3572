"""GRPO on running sums: two rollout replicas and one trainer on a laptop.

    laminar-flow run flows/quickstart.py
    laminar-flow run flows/quickstart.py --steps 10 --staleness-ceiling 0
    laminar-flow query latest "select trained_step, avg(reward) from experience group by 1 order by 1"

The model (0.8 M parameters, made by `flows/train_base.py`) can write a sum out step by step, but slips; rewards
for right answers make it careful.
"""

from pathlib import Path

import laminar as lm

MODEL = Path(__file__).parent / "models" / "running-sums"
SUMS = {"min_terms": 2, "max_terms": 6, "max_digits": 2}


@lm.task
def held_out(size: int) -> lm.Prompts:
    """Problems that training never sees: another seed."""
    return lm.reasoning_gym("chain_sum", size=size, seed=1_000_001, **SUMS)


@lm.flow
def quickstart(
    steps: int = 48,
    batch_size: int = 128,
    group_size: int = 8,
    lr: float = 3e-5,
    replicas: int = 2,
    temperature: float = 1.0,
    staleness_ceiling: int | None = None,
    eval_size: int = 256,
    evaluate_every: int = 16,
    seed: int = 0,
):
    """Post-train the tiny base model on sums and evaluate it on sums it never saw.

    Parameters
    ----------
    steps
        Optimizer steps, each on one batch.
    batch_size
        Trajectories in a batch: `batch_size / group_size` prompts, `group_size` answers each.
    group_size
        Answers sampled for one prompt; their rewards are compared with each other.
    lr
        Learning rate of AdamW.
    replicas
        Rollout workers, each with its own engine.
    temperature
        Sampling temperature in training.
    staleness_ceiling
        Most weight updates between generating and training on an answer; 0 is synchronous and on-policy.
    eval_size
        Held-out problems.
    evaluate_every
        Steps between evaluations, besides those at the start and the end.
    seed
        Seed of the prompts' order, of sampling and of training.
    """
    test = held_out(eval_size)
    policy = lm.post_train(
        model=str(MODEL),
        environment=lm.reasoning_gym("chain_sum", seed=seed, **SUMS),
        algorithm=lm.GRPO(group_size=group_size),
        optimizer=lm.AdamW(lr=lr, warmup_steps=4),
        rollouts=lm.Rollouts(replicas=replicas, temperature=temperature, max_new_tokens=96, kv_tokens=32768),
        steps=steps,
        batch_size=batch_size,
        staleness_ceiling=staleness_ceiling,
        evaluate_on=test,
        evaluate_every=evaluate_every,
        max_tokens_per_microbatch=2048,
        seed=seed,
    )
    return lm.evaluate(policy, test)
