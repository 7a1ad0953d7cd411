"""A policy for Shoal's world as a program of its own:

    shoal world --policy rule --policy-pipe 'python3 examples/world_policy.py'

Each line on stdin is a tick: {"tick", "seed", "observations": {"agent_0": "…"}, "rewards", "infos"}; each wants one line
{"actions": {"agent_0": …}} back, for exactly these agents. Tick 0 begins a world. Words for people belong on stderr."""
import json
import random
import sys

MOVES = {"↑": "move_north", "↓": "move_south", "→": "move_east", "←": "move_west"}


def act(observation, cell, rng, size=20):
    has_food = "has food" in observation
    if "here: food" in observation and not has_food:
        return "pick_food"
    if "at home" in observation and has_food:
        return "drop_food"
    seen = observation.partition("See: ")[2].split()
    for thing in seen:
        if thing[:-1] == ("home" if has_food else "food"):
            return MOVES[thing[-1]]
    free = [move for arrow, move in MOVES.items() if "wall" + arrow not in seen]
    if has_food:  # home is in the middle
        dx, dy = size // 2 - cell[0], size // 2 - cell[1]
        wanted = [m for m, good in (("move_east", dx > 0), ("move_west", dx < 0), ("move_north", dy > 0),
                                    ("move_south", dy < 0)) if good and m in free]
        if wanted and rng.random() < 0.8:
            return rng.choice(wanted)
    return rng.choice(free or list(MOVES.values()))


def main():
    rng = random.Random(0)
    for line in sys.stdin:
        world = json.loads(line)
        if world["tick"] == 0:
            rng = random.Random(world["seed"])
        actions = {agent: act(text, world["infos"][agent]["cell"], rng)
                   for agent, text in world["observations"].items()}
        print(json.dumps({"actions": actions}), flush=True)


if __name__ == "__main__":
    main()
