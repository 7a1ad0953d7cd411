"""Shoal's world as an environment with PettingZoo's Parallel API: a class around `shoal world --pipe`.

    python3 examples/world_env.py [SHOAL] [--rule=value ...]

It needs only the standard library. For PettingZoo, derive the class from ParallelEnv and make action_space() from
`actions`; observations are text (observation space Text).
"""
import json
import random
import subprocess
import sys


class ShoalWorld:
    metadata = {"name": "shoal_world_v0", "render_modes": []}

    def __init__(self, shoal="build/shoal", *flags):
        self.process = subprocess.Popen([shoal, "world", "--pipe", *flags], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, encoding="utf-8")
        spaces = self.send("spaces")
        self.possible_agents, self.actions = spaces["possible_agents"], spaces["actions"]
        self.agents = []

    def send(self, request, content=None):
        self.process.stdin.write(json.dumps({request: content or {}}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("shoal has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def reset(self, seed=None, options=None):
        answer = self.send("reset", {"seed": seed, "options": options})
        self.agents = list(answer["observations"])
        return answer["observations"], answer["infos"]

    def step(self, actions):
        """actions: for every agent of self.agents its name, a number or a model's free text."""
        a = self.send("step", actions)
        ended = {x for x in self.agents if a["terminations"][x] or a["truncations"][x]}
        self.agents = [x for x in self.agents if x not in ended]
        return a["observations"], a["rewards"], a["terminations"], a["truncations"], a["infos"]

    def state(self):
        return self.send("state")["state"]

    def restore(self, state):
        answer = self.send("restore", state)
        self.agents = list(answer["observations"])
        return answer["observations"], answer["infos"]

    def close(self):
        self.send("close")
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def act(rng, observation):
    here, held = observation.split()[4:6]  # letters: docs/WORLD.md
    if here == "f" and held == "-":
        return "I pick up the food"  # free text is accepted
    if here == "h" and held == "f":
        return 5  # the number of drop_food
    return rng.choice(["move_north", "move_south", "move_east", "move_west"])


def run_episode(env, observations, rng):
    total = 0.0
    while env.agents:
        observations, rewards, _, _, _ = env.step({a: act(rng, observations[a]) for a in env.agents})
        total += sum(rewards.values())
    return total


def main():
    env = ShoalWorld(*(sys.argv[1:] or ["build/shoal"]))
    observations, infos = env.reset(seed=7, options={"agents": 8, "steps": 120, "food": 20})
    print(infos["agent_0"]["prompt"])
    snapshot = env.state()
    first = run_episode(env, observations, random.Random(1))
    observations, _ = env.restore(snapshot)
    second = run_episode(env, observations, random.Random(1))
    print(f"reward of 8 agents in 120 steps: {first:.1f}; again from the snapshot: {second:.1f}")
    try:
        env.step({"agent_0": "north"})
    except ValueError as e:
        print("after the end:", e)
    env.close()
    return 0 if first == second else 1


if __name__ == "__main__":
    sys.exit(main())
