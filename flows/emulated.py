"""A run without a model: emulated 32B replicas and an emulated trainer, to see how a cluster would be scheduled.

    laminar-flow run flows/emulated.py --replicas 8 --time-scale 20
    laminar-flow query latest "select avg(migrations), avg(finish_version - weight_version) from experience"

Every replica takes the time that four H800 take for the 32B model (`Emulation`), the trainer 300 emulated seconds a
step. Answers have no text, so every reward is 0.
"""

import laminar as lm


@lm.flow
def emulated(
    steps: int = 4,
    replicas: int = 4,
    batch_size: int = 512,
    group_size: int = 16,
    repack: bool = True,
    time_scale: float = 20.0,
    seed: int = 0,
):
    """Schedule emulated replicas.

    Parameters
    ----------
    steps
        Optimizer steps of the emulated trainer.
    replicas
        Emulated replicas, each a worker process.
    batch_size
        Trajectories of one step.
    group_size
        Answers sampled for one prompt.
    repack
        Move the long tail onto few replicas.
    time_scale
        Emulated seconds in one real one.
    seed
        Seed of lengths and of the prompts' order.
    """
    return lm.post_train(
        model="emulated",
        environment=lm.reasoning_gym("chain_sum", seed=seed),
        algorithm=lm.GRPO(group_size=group_size),
        rollouts=lm.Rollouts(
            engine="emulated",
            replicas=replicas,
            slots=512,
            max_new_tokens=16384,
            kv_tokens=850_000,
            repack=repack,
            emulation=lm.Emulation(time_scale=time_scale, seed=seed),
        ),
        steps=steps,
        batch_size=batch_size,
        seed=seed,
    )
