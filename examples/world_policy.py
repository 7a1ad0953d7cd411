"""A policy for Shoal's world as a separate program:

    shoal world --policy rule --policy-pipe 'python3 examples/world_policy.py'

Each line on stdin is a tick: {"tick", "seed", "observations": {"agent_0": "…"}, "rewards", "infos"}; each requires one
line {"actions": {"agent_0": …}} as its answer, for exactly these agents. Tick 0 begins a world. Messages for users go
to stderr.
"""
import json
import random
import sys

MOVES = ["move_north", "move_south", "move_east", "move_west"]


def act(observation, rng):
    """A compact observation: the four adjacent cells, the agent's cell, the held item, the direction of the goal along
    y and x.
    """
    letters = observation.split()
    around, (here, held, along_y, along_x) = letters[:4], letters[4:8]
    if held == "-" and here in "fm":
        return "pick_food"
    if held != "-" and here == "h":
        return "drop_food"
    if held == "-" and "f" in around:
        return MOVES[around.index("f")]
    free = [move for move, letter in zip(MOVES, around) if letter not in "xz"]
    wanted = [move for move in free if move[5] in (along_y, along_x)]
    if wanted and rng.random() < 0.8:
        return rng.choice(wanted)
    return rng.choice(free or MOVES)


def main():
    rng = random.Random(0)
    for line in sys.stdin:
        world = json.loads(line)
        if world["tick"] == 0:
            rng = random.Random(world["seed"])
        actions = {agent: act(text, rng) for agent, text in world["observations"].items()}
        print(json.dumps({"actions": actions}), flush=True)


if __name__ == "__main__":
    main()
