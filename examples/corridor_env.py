r"""An example environment in which Shoal's agents learn: corridors with a treasure at one end.

    shoal world models/fry --env-pipe 'python3 examples/corridor_env.py' --num-envs 8 --num-adapters 1 --generations 8 \
        --update-interval 2 --batch-size 16 --horizon 16 --discount 0.9 --lr 3e-3 --temperature 3 --entropy-coef 0.1 \
        --warmup-steps 10 --eval-maps 8

Each of four agents is in a separate corridor. It observes its position, a letter from `a` (left end) to `e`, and at
which end the treasure is: `<` (left) or `>` (right). An agent that takes the action `open` at the treasure gets the
reward 1 and another corridor; any other action costs 0.02. All episodes are truncated after 100 steps. The program
needs only the standard library. It answers each line of JSON on stdin with one line on stdout (docs/WORLD.md).
"""
import json
import random
import sys

AGENTS, LENGTH, STEPS = 4, 5, 100
ACTIONS = ["left", "right", "open"]


class Corridor:
    def __init__(self, seed):
        self.rng, self.tick = random.Random(seed), 0
        self.position, self.goal = [0] * AGENTS, [0] * AGENTS
        for i in range(AGENTS):
            self.new_corridor(i)

    def new_corridor(self, i):
        self.position[i], self.goal[i] = LENGTH // 2, self.rng.choice([0, LENGTH - 1])

    def observations(self):
        return {"observations": {f"agent_{i}": f"{'abcde'[self.position[i]]} {'>' if self.goal[i] else '<'}"
                                 for i in range(AGENTS)}}

    def act(self, i, action):
        if action == "open" and self.position[i] == self.goal[i]:
            self.new_corridor(i)
            return 1.0
        step = {"left": -1, "right": 1, "open": 0}[action]
        self.position[i] = min(max(self.position[i] + step, 0), LENGTH - 1)
        return -0.02

    def step(self, actions):
        rewards = {agent: self.act(int(agent[6:]), action) for agent, action in actions.items()}
        self.tick += 1
        truncated = self.tick >= STEPS
        return {**self.observations(), "rewards": rewards, "terminations": {a: False for a in rewards},
                "truncations": {a: truncated for a in rewards}}


def answer(worlds, request):
    world = request.get("world", 0)
    if "spaces" in request:
        return {"possible_agents": [f"agent_{i}" for i in range(AGENTS)], "actions": ACTIONS, "max_steps": STEPS}
    if "reset" in request:
        worlds[world] = Corridor(request["reset"]["seed"])
        return worlds[world].observations()
    return worlds[world].step(request["step"])


def main():
    worlds = {}
    for line in sys.stdin:
        message = json.loads(line)
        is_list = isinstance(message, list)
        answers = [answer(worlds, request) for request in (message if is_list else [message])]
        print(json.dumps(answers if is_list else answers[0]), flush=True)


if __name__ == "__main__":
    main()
