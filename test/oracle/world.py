#!/usr/bin/env python3
"""world: an independent implementation of the rules of Shoal's grid world.

    python3 test/oracle/world.py                   writes test/golden/world/*.jsonl
    python3 test/oracle/world.py --check           compares them with its results; ok/not ok lines
    python3 test/oracle/world.py --show CASE TICK  every agent's texts at that tick

The code is written for obvious correctness, not speed: cells are pairs (x, y), kinds of cells are sets of them, and
every search begins from scratch. It follows the rules in src/world/world.h and shares no code with src/; it also has its own
implementation of Philox. Python's random module is not used: actions of the traces come from a Philox stream too, so the files
never change.
"""
import hashlib
import json
import os
import sys

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden", "world")

# Randomness: Philox4x32-10, the key is the seed, the counter (n, step, id, purpose).

RNG_TEST, RNG_WORLD = 10, 12  # purposes, numbered in src/base/base.h
WALLS, HOMES, FOOD, MATERIAL, BEGIN, PREDATOR_BEGIN, PREDATOR_MOVE = 0, 1, 2, 3, 4, 5, 16
M32 = 0xFFFFFFFF


def philox(key, counter):
    k0, k1 = key
    a, b, c, d = counter
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k0, q & M32, p >> 32 ^ d ^ k1, p & M32
        k0, k1 = k0 + 0x9E3779B9 & M32, k1 + 0xBB67AE85 & M32
    return [a, b, c, d]


class Stream:
    def __init__(self, seed, purpose, ident, step):
        self.key = (seed & M32, seed >> 32)
        self.n, self.rest = 0, [step, ident, purpose]
        self.ready = []

    def u32(self):
        if not self.ready:
            self.ready = philox(self.key, [self.n] + self.rest)
            self.n += 1
        return self.ready.pop(0)

    def below(self, n):
        """Uniform in 0 … n-1: the high half of a product, redrawn if the low half would bias the result."""
        while True:
            product = self.u32() * n
            if product & M32 >= (1 << 32) % n:
                return product >> 32

    def inner_cell(self, size):
        x = 1 + self.below(size - 2)
        return x, 1 + self.below(size - 2)


# Rules

LEGACY = {
    "size": 20, "walls": -1, "food": 5, "food_every": 50, "energy": 200, "meal": 0, "here": False, "brief": False,
    "reachable": False, "homes": 1, "predators": 0, "sight": 0, "bite": 0, "material": 0, "material_every": 1, "words": 0, "hearing": 0,
    "map": [],
    "rewards": {"move": -0.2, "fresh": 0.5, "food": 3.0, "home": 5.0, "blocked": -3.0, "pick": 10.0, "drop": 20.0,
                "built": 10.0, "wrong": -1.0, "bitten": -5.0},
}
REPAIRED = dict(LEGACY, here=True, brief=True, reachable=True, meal=100, food=8, food_every=10,
                rewards=dict(LEGACY["rewards"], food=0.0, home=0.0, wrong=-0.3))
RULE_SETS = {"legacy": LEGACY, "repaired": REPAIRED}


def rules_of(name, keys):
    rules = dict(RULE_SETS[name], **keys)
    rules["rewards"] = dict(RULE_SETS[name]["rewards"], **keys.get("rewards", {}))
    return rules


def yaml_text(keys):
    """JSON values are valid YAML."""
    return "".join("%s: %s\n" % (key, json.dumps(value)) for key, value in keys.items())


# The world

NORTH, SOUTH, EAST, WEST, PICK, DROP = range(6)
ACTIONS = ["move_north", "move_south", "move_east", "move_west", "pick_food", "drop_food"]
STEP = {NORTH: (0, 1), SOUTH: (0, -1), EAST: (1, 0), WEST: (-1, 0)}
ARROW = {NORTH: "↑", SOUTH: "↓", EAST: "→", WEST: "←"}
KNOWN = 10  # number of food cells that an agent remembers
TRIES = 64  # attempts to find a free cell


def neighbour(cell, direction):
    return cell[0] + STEP[direction][0], cell[1] + STEP[direction][1]


def distance(a, b):
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def first_letter(kinds, cell, otherwise):
    return next((letter for letter, cells in kinds if cell in cells), otherwise)


class Agent:
    def __init__(self, cell, energy):
        self.cell, self.energy, self.alive = cell, energy, True
        self.holds = None  # "food", "material"
        self.word = 0
        self.known, self.last = [], []
        self.seen = {cell}
        self.steps = self.collected = self.delivered = self.built = self.blocked = self.bites = 0
        self.reward = self.total = 0.0

    def fitness(self):
        f = self.total + 5 * self.collected + 10 * self.delivered + 0.1 * self.steps
        return max(f + 50 * self.delivered / (self.steps + 1), 0.0)


class World:
    def __init__(self, rules, n_agents, seed):
        self.rules, self.seed, self.tick = rules, seed, 0
        self.food, self.material = set(), set()
        self.begins = []
        self.count = dict.fromkeys(["food_grown", "food_eaten", "food_lost", "material_grown", "material_built",
                                    "material_lost", "energy_given", "energy_spent"], 0)
        if rules["map"]:
            self.parse_map()
        else:
            self.size = rules["size"]
            self.homes = self.place_homes()
            self.walls = self.place_walls()
        self.agents = [self.new_agent(i) for i in range(n_agents)]
        self.predators = [self.free_cell(PREDATOR_BEGIN, p, self.homes) for p in range(rules["predators"])]
        self.grow(1)
        self.grow(0)
        self.update_memory()

    def stream(self, ident, step):
        return Stream(self.seed, RNG_WORLD, ident, step)

    # reset

    def parse_map(self):
        """A map that is not square is extended to a square, in the north or east, by walls."""
        rows = self.rules["map"]
        height, width = len(rows), len(rows[0])
        self.size = max(height, width)
        at = {"#": [(x, y) for x in range(self.size) for y in range(self.size) if x >= width or y >= height]}
        for y, row in zip(reversed(range(height)), rows):
            for x, letter in enumerate(row):
                at.setdefault(letter, []).append((x, y))
        self.walls = set(at["#"])
        self.homes = at["H"]
        self.begins = at.get("A", [])
        self.food, self.material = set(at.get("F", [])), set(at.get("M", []))
        self.count["food_grown"], self.count["material_grown"] = len(self.food), len(self.material)

    def place_homes(self):
        homes = [(self.size // 2, self.size // 2)]
        r = self.stream(HOMES, 0)
        for _ in range(self.rules["homes"] - 1):
            for _ in range(TRIES):
                cell = r.inner_cell(self.size)
                if cell not in homes:
                    homes.append(cell)
                    break
        return homes

    def inner_cells(self):
        inside = range(1, self.size - 1)
        return {(x, y) for x in inside for y in inside}

    def place_walls(self):
        all_cells = {(x, y) for x in range(self.size) for y in range(self.size)}
        border = all_cells - self.inner_cells()
        if not self.rules["reachable"]:
            return border | self.draw_walls(0)
        for attempt in range(TRIES):
            free = self.reached(self.inner_cells() - self.draw_walls(attempt))
            if 2 * len(free) >= len(self.inner_cells()):
                return all_cells - free
        return border

    def draw_walls(self, attempt):
        r = self.stream(WALLS, attempt)
        n = self.size if self.rules["walls"] == -1 else self.rules["walls"]
        drawn = [r.inner_cell(self.size) for _ in range(n)]
        return set(drawn) - set(self.homes)

    def reached(self, free):
        """The free cells that can be reached from a home."""
        reached = set(self.homes)
        while True:
            more = {neighbour(c, d) for c in reached for d in STEP} & free - reached
            if not more:
                return reached
            reached |= more

    def free_cell(self, ident, step, but=()):
        r = self.stream(ident, step)
        for _ in range(TRIES):
            cell = r.inner_cell(self.size)
            if cell not in self.walls and cell not in but:
                return cell
        return self.homes[0]

    def new_agent(self, i):
        cell = self.begins[i % len(self.begins)] if self.begins else self.free_cell(BEGIN, i)
        self.count["energy_given"] += self.rules["energy"]
        return Agent(cell, self.rules["energy"])

    def grow(self, extra=0):
        """Adds food, then material; reset calls it twice."""
        if self.tick % self.rules["food_every"] == 0:
            self.grow_kind("food", self.food, self.stream(FOOD, 2 * self.tick + extra))
        if self.tick % self.rules["material_every"] == 0:
            self.grow_kind("material", self.material, self.stream(MATERIAL, 2 * self.tick + extra))

    def grow_kind(self, kind, where, r):
        for _ in range(self.rules[kind]):
            cell = r.inner_cell(self.size)
            if cell in self.walls or cell in self.homes or cell in self.food or cell in self.material:
                continue
            where.add(cell)
            self.count[kind + "_grown"] += 1

    # a step

    def step(self, actions):
        for agent, action in zip(self.agents, actions):
            agent.reward = 0.0
            if agent.alive:
                self.act(agent, action)
                agent.steps += 1
                self.lose_energy(agent, 1)
        for p in range(len(self.predators)):
            self.move_predator(p)
        self.tick += 1
        self.grow()
        self.update_memory()

    def act(self, agent, action):
        agent.word, action = action // len(ACTIONS), action % len(ACTIONS)
        agent.last = (agent.last + [action])[-2:]
        agent.reward = self.reward_of(agent, action)
        agent.total += agent.reward

    def reward_of(self, agent, action):
        rewards = self.rules["rewards"]
        if action == PICK:
            return rewards[self.pick(agent)]
        if action == DROP:
            return rewards[self.drop(agent)]
        cell = neighbour(agent.cell, action)
        if cell in self.walls:
            agent.blocked += 1
            return rewards["blocked"]
        reward = rewards["move"]
        if cell not in agent.seen:
            reward += rewards["fresh"]
        if cell in self.food:
            reward += rewards["food"]
        elif cell in self.homes and agent.holds:
            reward += rewards["home"]
        agent.cell = cell
        agent.seen.add(cell)
        return reward

    def pick(self, agent):
        if agent.holds:
            return "wrong"
        if agent.cell in self.food:
            self.food.remove(agent.cell)
            agent.known = [c for c in agent.known if c != agent.cell]
            agent.collected += 1
            agent.holds = "food"
            return "pick"
        if agent.cell in self.material:
            self.material.remove(agent.cell)
            agent.holds = "material"
            return "pick"
        return "wrong"

    def drop(self, agent):
        if agent.cell not in self.homes or not agent.holds:
            return "wrong"
        held, agent.holds = agent.holds, None
        if held == "material":
            agent.built += 1
            self.count["material_built"] += 1
            return "built"
        agent.delivered += 1
        self.count["food_eaten"] += 1
        meal = min(self.rules["meal"], self.rules["energy"] - agent.energy)
        agent.energy += meal
        self.count["energy_given"] += meal
        return "drop"

    def lose_energy(self, agent, much):
        agent.energy -= much
        self.count["energy_spent"] += much
        if agent.energy > 0:
            return
        agent.alive = False
        if agent.holds:
            self.count[agent.holds + "_lost"] += 1
        agent.holds = None

    def move_predator(self, p):
        self.predators[p] = self.predator_target(p)
        for agent in self.agents:
            if agent.alive and agent.cell == self.predators[p] and agent.cell not in self.homes:
                agent.bites += 1
                agent.reward += self.rules["rewards"]["bitten"]
                agent.total += self.rules["rewards"]["bitten"]
                self.lose_energy(agent, min(self.rules["bite"], agent.energy))

    def predator_target(self, p):
        at = self.predators[p]
        seen = [a for a in self.agents if a.alive and distance(a.cell, at) <= self.rules["sight"]]
        if seen:
            prey = min(seen, key=lambda a: distance(a.cell, at))  # the first of the nearest
            candidates = self.approach_directions(prey.cell[0] - at[0], prey.cell[1] - at[1])
        else:
            candidates = [self.stream(PREDATOR_MOVE + p, self.tick).below(4)]
        for direction in candidates:
            cell = neighbour(at, direction)
            if cell not in self.walls and cell not in self.homes:
                return cell
        return at

    @staticmethod
    def approach_directions(dx, dy):
        """The directions that reduce the distance, the longer axis first."""
        along_x = [EAST if dx > 0 else WEST] if dx else []
        along_y = [NORTH if dy > 0 else SOUTH] if dy else []
        return along_x + along_y if abs(dx) >= abs(dy) else along_y + along_x

    def update_memory(self):
        for agent in self.agents:
            for direction in STEP if agent.alive else []:
                cell = neighbour(agent.cell, direction)
                if cell in self.food and cell not in agent.known:
                    agent.known = (agent.known + [cell])[-KNOWN:]

    # words

    def here(self, agent):
        if not self.rules["here"]:
            return ""
        if agent.cell in self.food:
            return ", here: food"
        if agent.cell in self.material:
            return ", here: material"
        return ", at home" if agent.cell in self.homes else ""

    def explored(self, agent):
        x0, y0 = agent.cell
        around = [(x, y) for x in range(x0 - 3, x0 + 4) for y in range(y0 - 3, y0 + 4)
                  if 0 <= x < self.size and 0 <= y < self.size]
        share = len([c for c in around if c in agent.seen]) / len(around)
        return ", unexplored area" if share < 0.3 else ", familiar area" if share > 0.8 else ""

    def items(self, agent):
        kinds = [("food", self.food), ("home", self.homes), ("wall", self.walls), ("material", self.material),
                 ("wolf", self.predators)]
        return [name + ARROW[d] for name, cells in kinds for d in STEP if neighbour(agent.cell, d) in cells]

    def heard(self, agent):
        return [str(a.word) for a in self.agents
                if a is not agent and a.alive and a.word and distance(a.cell, agent.cell) <= self.rules["hearing"]]

    def observe(self, agent):
        return self.observe_letters(agent) if self.rules["brief"] else self.observe_words(agent)

    def observe_words(self, agent):
        text = "At (%d,%d), E%d" % (agent.cell + (agent.energy,))
        if agent.holds:
            text += ", has " + agent.holds
        text += self.here(agent) + self.explored(agent)
        if agent.known and not agent.holds:
            text += ", remember %d food" % len(agent.known)
        if self.items(agent):
            text += ". See: " + " ".join(self.items(agent))
        if self.heard(agent):
            text += ". Heard: " + " ".join(self.heard(agent))
        return text

    def goal(self, agent):
        """The agent's destination; its own cell if it has none."""
        if agent.holds:
            places = [c for c in self.homes if c == self.homes[0] or c in agent.seen]
        else:
            places = [c for c in agent.known if c not in agent.seen]
        return min(places, key=lambda c: distance(c, agent.cell), default=agent.cell)  # the first of the nearest

    def observe_letters(self, agent):
        hidden = [("z", self.predators), ("x", self.walls)]
        ground = [("f", self.food), ("m", self.material), ("h", self.homes), ("o", agent.seen)]
        slots = [first_letter(hidden + ground, neighbour(agent.cell, d), "u") for d in STEP]
        slots.append(first_letter(ground, agent.cell, "o") if self.rules["here"] else "o")
        slots.append({None: "-", "food": "f", "material": "m"}[agent.holds])
        (x, y), (goal_x, goal_y) = agent.cell, self.goal(agent)
        slots.append("n" if goal_y > y else "s" if goal_y < y else "-")
        slots.append("e" if goal_x > x else "w" if goal_x < x else "-")
        slots.append("+" if agent.energy >= self.rules["energy"] / 2 else "-")
        return " ".join(slots + (self.heard(agent) if self.rules["words"] else []))

    def prompt(self, agent):
        if self.rules["brief"]:
            last = ["-", "-"] + ["nsewpd"[a] for a in agent.last]
            return " ".join([self.observe(agent)] + last[-2:]) + ":"
        last = "[%s] " % ",".join(ACTIONS[a] for a in agent.last) if agent.last else ""
        return last + self.observe(agent) + ". Action:"

    def drawn(self):
        def letter(cell):
            kinds = [("#", self.walls), ("H", self.homes), ("F", self.food), ("M", self.material)]
            return "".join([name for name, cells in kinds if cell in cells]) or "."
        return ["".join(letter((x, y)) for x in range(self.size)) for y in reversed(range(self.size))]


# Actions of text answers

MOVES = [(["north", "up", "↑"], NORTH), (["south", "down", "↓"], SOUTH), (["east", "right", "→"], EAST),
         (["west", "left", "←"], WEST)]
VERBS = [(["pick", "collect", "take"], PICK), (["drop", "store", "deliver"], DROP)]


def parse(text, repaired):
    text = "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in text)
    for words, action in VERBS + MOVES if repaired else MOVES + VERBS:
        if any(word in text for word in words):
            return action
    return -1


ANSWERS = [
    "move_north", "move_south", "move_east", "move_west", "pick_food", "drop_food", "", " ", "wait", "stay here",
    "pick up food", "Pick up the food", "take it to the west", "drop it on the left", "put down", "go up then down",
    "down then up", "west, then north", "left right", "right left", "go right", "EAST", "North!", "sOuTh", "↑", "↓", "→",
    "←", "← ↑", "→↓", "the upper left", "support", "copyright", "leftovers", "feast", "least", "northwest",
    "southeast",
    "store", "restored", "deliver it north", "collect", "recollection", "mistake", "take", "dropped", "download",
    "uppercase", "drop, then pick", "pick, then drop", "store what you collect", "I'd deliver the food home",
    "no rth", "no\nrth", "so\tuth", "eats", "wets", "go home\nmove_west\npick", "1. move_east 2. drop_food", "北へ", "上↑",
    "É↓", "NORTH↓", "picnic", "picky eaters go west", "stories", "storey", "driver", "backup", "upend: south", "rightly so",
    "bereft", "cleft", "wester", "pIcK", "TAKE ↑", "ac\u0131tion \u212aup", "tak", "dro", "nort", "up", "UP", "u p",
]


def answers():
    """Each answer with its action under the rules "legacy" and "repaired"."""
    return ["%s\n" % as_json([text, parse(text, False), parse(text, True)]) for text in ANSWERS]


# Traces

class Actor:
    """Chooses a greedy action that knows the whole world, with a probability of `greedy` percent, else a random one.
    Words are random.
    """

    def __init__(self, world, case):
        self.world, self.share, self.explores = world, case.get("greedy", 50), case.get("explores", False)
        self.r = Stream(world.seed, RNG_TEST, 0, 0)

    def act(self, agent):
        word = self.r.below(self.world.rules["words"] + 1)
        greedy = self.r.below(100) < self.share
        random_action = self.r.below(len(ACTIONS))
        return len(ACTIONS) * word + (self.greedy_action(agent, random_action) if greedy and agent.alive else random_action)

    def greedy_action(self, agent, otherwise):
        w = self.world
        goals = set(w.homes) if agent.holds else w.food | w.material
        if self.explores:
            goals = w.inner_cells() - w.walls - agent.seen
        if agent.cell in goals:
            return DROP if agent.holds else PICK
        return self.towards(agent.cell, goals, otherwise)

    def towards(self, cell, goals, otherwise):
        near = set(goals)  # grows until it reaches the agent
        while True:
            for direction in STEP:
                if neighbour(cell, direction) in near:
                    return direction
            more = {neighbour(c, d) for c in near for d in STEP} - self.world.walls - near
            if not more:
                return otherwise
            near |= more


def as_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def cell_number(world, cell):
    return cell[1] * world.size + cell[0]


def agent_line(world, agent, full_texts):
    """[cell, energy, alive, reward], its two texts and its memory, or only the beginning of the texts' hash; [] for an
    agent that died earlier.
    """
    if not agent.alive and agent.reward == 0.0:
        return []
    line = [cell_number(world, agent.cell), agent.energy, int(agent.alive), agent.reward]
    if not agent.alive:
        return line
    texts = [world.observe(agent), world.prompt(agent)]
    if full_texts:
        return line + texts + [[cell_number(world, c) for c in agent.known]]
    return line + [hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]]


def tick_line(world, case, actions):
    line = {"tick": world.tick}
    if actions:
        line["do"] = actions
    if world.predators:
        line["predators"] = [cell_number(world, c) for c in world.predators]
    line["agents"] = [agent_line(world, a, world.tick % case["spell"] == 0) for a in world.agents]
    return as_json(line) + "\n"


def end_line(world):
    names = ["total", "steps", "collected", "delivered", "built", "blocked", "bites"]
    agents = [dict([("fitness", a.fitness())] + [(n, getattr(a, n)) for n in names]) for a in world.agents]
    return as_json({"end": world.tick, "map": world.drawn(), "counts": world.count, "agents": agents}) + "\n"


def world_of(case):
    return World(rules_of(case["rules"], case["keys"]), case["agents"], case["seed"])


def trace(name, visit=lambda world: None):
    """The lines of a golden file. `visit` gets the world after every tick."""
    case = CASES[name]
    world = world_of(case)
    actor = Actor(world, case)
    head = {"about": case["about"], "rules": case["rules"], "yaml": yaml_text(case["keys"]),
            "agents": case["agents"], "seed": case["seed"], "ticks": case["ticks"], "map": world.drawn()}
    lines = [as_json(head) + "\n", tick_line(world, case, None)]
    visit(world)
    while world.tick < case["ticks"]:
        actions = [actor.act(a) for a in world.agents]
        world.step(actions)
        lines.append(tick_line(world, case, actions))
        visit(world)
    return lines + [end_line(world)]


MAP = [
    "############",
    "#A..#....M.#",
    "#.#.#.##.#.#",
    "#.#...#F.#A#",
    "#.###.####.#",
    "#...#H..F..#",
    "###.####.#.#",
    "#F..#A...#.#",
    "#.#.#.####.#",
    "#.#...M..#H#",
    "#A#.#.#....#",
    "############",
]
EVERYTHING = {
    "map": MAP[:1] + [row.replace("A", ".") for row in MAP[1:]], "food": 3, "food_every": 10, "material": 2,
    "material_every": 10, "predators": 3, "sight": 3, "bite": 20, "words": 15, "hearing": 6, "energy": 70, "meal": 25,
}
CASES = {
    "legacy": {
        "about": "the legacy rules, until all agents are dead and three ticks beyond",
        "rules": "legacy", "keys": {}, "agents": 5, "seed": 1, "ticks": 203, "spell": 25},
    "legacy-small": {
        "about": "every string spelled; other numbers",
        "rules": "legacy", "keys": {"size": 9, "walls": 12, "food": 3, "food_every": 7, "energy": 90},
        "agents": 3, "seed": 42, "ticks": 100, "spell": 1},
    "legacy-crowd": {
        "about": "twenty at once who take each other's food; walls that lock some in; a long seed",
        "rules": "legacy", "keys": {"size": 12, "walls": 60, "food": 9, "food_every": 4},
        "agents": 20, "seed": 9007199254740993 + (3 << 60), "ticks": 60, "spell": 20},
    "legacy-here": {
        "about": "only the observation is repaired, and the rewards are others",
        "rules": "legacy",
        "keys": {"size": 7, "here": True, "food": 2, "food_every": 9,
                 "rewards": {"move": -0.1, "fresh": 0.7, "food": 1.1, "home": 2.3, "blocked": -0.3, "pick": 0.123456789,
                             "drop": 1e-3, "wrong": -1e2}},
        "agents": 2, "seed": 5, "ticks": 150, "spell": 10},
    "legacy-brief": {
        "about": "letters that do not say what is on the own cell; food that is remembered and gone; an odd energy",
        "rules": "legacy",
        "keys": {"size": 8, "walls": 6, "brief": True, "food": 4, "food_every": 13, "energy": 81, "words": 2,
                 "hearing": 3},
        "agents": 4, "seed": 6, "ticks": 84, "spell": 1, "greedy": 70},
    "repaired-words": {
        "about": "the repaired world told in words",
        "rules": "repaired", "keys": {"brief": False}, "agents": 8, "seed": 7, "ticks": 120, "spell": 25, "greedy": 60},
    "repaired": {
        "about": "the repaired world as it comes",
        "rules": "repaired", "keys": {}, "agents": 8, "seed": 7, "ticks": 240, "spell": 25, "greedy": 60},
    "repaired-hungry": {
        "about": "meals decide who lives, and are cut off at what an agent can hold",
        "rules": "repaired", "keys": {"size": 10, "energy": 45, "meal": 30, "food": 2, "food_every": 15},
        "agents": 6, "seed": 11, "ticks": 160, "spell": 25},
    "repaired-plenty": {
        "about": "more food than an agent remembers",
        "rules": "repaired", "keys": {"size": 16, "food": 40, "food_every": 3, "brief": False},
        "agents": 4, "seed": 12, "ticks": 80, "spell": 16, "greedy": 30},
    "repaired-walls": {
        "about": "walls are drawn more than once until enough cells can be reached",
        "rules": "repaired", "keys": {"size": 14, "walls": 86}, "agents": 4, "seed": 3, "ticks": 60, "spell": 15},
    "repaired-full": {
        "about": "so many walls that none are left, and time enough to know the place",
        "rules": "repaired", "keys": {"size": 9, "walls": 400, "brief": False},
        "agents": 2, "seed": 4, "ticks": 120, "spell": 10, "greedy": 85, "explores": True},
    "homes": {
        "about": "several homes, of which all give a meal, and which further walls leave free",
        "rules": "repaired", "keys": {"size": 15, "homes": 6, "walls": 50},
        "agents": 5, "seed": 21, "ticks": 100, "spell": 10},
    "predators": {
        "about": "wolves that see, roam, bite and kill, walls and homes in their way",
        "rules": "repaired",
        "keys": {"size": 11, "walls": 30, "reachable": False, "homes": 7, "predators": 5, "sight": 4,
                 "bite": 9, "energy": 80, "meal": 40, "rewards": {"bitten": -4.7}},
        "agents": 7, "seed": 30, "ticks": 140, "spell": 10},
    "material": {
        "about": "building material beside food, which is held by those who die too",
        "rules": "repaired",
        "keys": {"size": 9, "material": 9, "material_every": 8, "food": 6, "food_every": 12, "energy": 60, "meal": 35,
                 "rewards": {"built": 7.25}},
        "agents": 6, "seed": 41, "ticks": 120, "spell": 10},
    "words": {
        "about": "who speaks, who is near enough to hear, and who is silent",
        "rules": "repaired", "keys": {"size": 9, "words": 3, "hearing": 4, "energy": 50, "meal": 20, "food": 3},
        "agents": 5, "seed": 51, "ticks": 80, "spell": 8},
    "map": {
        "about": "a drawn world: where homes, food, material and agents are",
        "rules": "repaired", "keys": {"map": MAP, "food": 2, "food_every": 20},
        "agents": 6, "seed": 61, "ticks": 90, "spell": 10, "greedy": 70},
    "map-oblong": {
        "about": "a drawn world that is no square, with a room that nobody can leave",
        "rules": "repaired",
        "keys": {"map": ["##########", "#A.F#..AM#", "#..#H##..#", "##..F.####", "#...#...A#", "##########"], "food": 1,
                 "food_every": 11, "energy": 60, "meal": 25, "brief": False},
        "agents": 3, "seed": 67, "ticks": 70, "spell": 7, "greedy": 70},
    "map-homes": {
        "about": "nothing but homes: wolves have no other place either, and nobody is bitten",
        "rules": "repaired",
        "keys": {"map": ["#####", "#HHH#", "#HH##", "#####"], "predators": 2, "sight": 3, "bite": 5, "energy": 24},
        "agents": 3, "seed": 69, "ticks": 26, "spell": 5},
    "everything": {
        "about": "every further key at once",
        "rules": "repaired", "keys": EVERYTHING, "agents": 9, "seed": 71, "ticks": 100, "spell": 10, "greedy": 60},
    "everything-words": {
        "about": "the same told in words",
        "rules": "repaired", "keys": dict(EVERYTHING, brief=False), "agents": 9, "seed": 71, "ticks": 100, "spell": 10,
        "greedy": 60},
}


def path_of(name):
    return os.path.join(FOLDER, name + ".jsonl")


def files():
    """Every golden file's name and its expected lines."""
    yield "answers", answers()
    for name in CASES:
        yield name, trace(name)


def check(name, want):
    if not os.path.exists(path_of(name)):
        return "no such file"
    with open(path_of(name), encoding="utf-8", newline="") as f:
        have = f.readlines()
    for i, line in enumerate(want):
        if i >= len(have) or have[i] != line:
            return "line %d is not what the oracle computes" % (i + 1)
    return "it has more lines than the oracle computes" if len(have) > len(want) else None


def check_all():
    failed = False
    for name, want in files():
        why = check(name, want)
        failed |= why is not None
        print("not ok oracle world %s: %s" % (name, why) if why else "ok oracle world " + name)
    names = {name + ".jsonl" for name in list(CASES) + ["answers"]}
    for extra in sorted(set(f for f in os.listdir(FOLDER) if f.endswith(".jsonl")) - names):
        failed = True
        print("not ok oracle world %s: the oracle has no such case" % extra)
    return failed


def show(name, tick):
    def visit(world):
        for i, agent in enumerate(world.agents):
            if world.tick == tick:
                print("%d %s %r %s" % (i, "alive" if agent.alive else "dead", agent.reward, world.prompt(agent)))
    trace(name, visit)


def main():
    if sys.argv[1:2] == ["--show"]:
        show(sys.argv[2], int(sys.argv[3]))
        return
    if sys.argv[1:] == ["--check"]:
        sys.exit(check_all())
    for name, lines in files():
        with open(path_of(name), "w", encoding="utf-8", newline="\n") as f:
            f.writelines(lines)


if __name__ == "__main__":
    main()
