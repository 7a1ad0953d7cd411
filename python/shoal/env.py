"""env: Shoal's grid world as an environment with the APIs of PettingZoo (parallel) and Gymnasium.

If pettingzoo and gymnasium are installed, the classes derive from theirs; else they are plain classes with the same
methods. docs/WORLD.md describes the rules, the observations and the actions.

    env = GridWorld(agents=4, steps=200)
    observations, infos = env.reset(seed=7)
    while env.agents:
        observations, rewards, terminations, truncations, infos = env.step(env.policy("rule"))
"""
from __future__ import annotations

import json
import os
import string
from collections.abc import Mapping
from typing import Any, NamedTuple

from ._call import call, encode, take_text
from ._handle import Handle
from ._library import ffi, lib
from .errors import UsageError
from .spaces import Discrete, Text

try:
    from pettingzoo import ParallelEnv
except ImportError:
    ParallelEnv = object
try:
    from gymnasium import Env
except ImportError:
    Env = object

#: An action is the index of a name, plus 6 · word with a rule set that has a vocabulary.
ACTIONS = ("move_north", "move_south", "move_east", "move_west", "pick_food", "drop_food")
OBSERVATION_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " ↑↓→←"
OBSERVATION_MAX_LENGTH = 1024
METADATA = {"name": "shoal_world_v0", "render_modes": ["ansi"], "is_parallelizable": True}


class AgentState(NamedTuple):
    """An agent: north is y + 1; holds: 0 nothing, 1 food, 2 material; reward of the last step, total and fitness of
    the episode; the other fields are counts of the episode."""

    alive: bool
    x: int
    y: int
    energy: int
    holds: int
    steps: int
    collected: int
    delivered: int
    built: int
    blocked: int
    bites: int
    reward: float
    total: float
    fitness: float


class GridWorld(ParallelEnv):
    """A grid world with 1 to 64 agents "agent_0", "agent_1", … as a PettingZoo ParallelEnv.

    rules: "repaired", "legacy" or a YAML file
    steps: the length of an episode, after which the living agents are truncated; a dead agent is terminated
    render_mode: "ansi" (render() returns the map as text) or None

    Observations are texts; infos are {"prompt": text for a model, "cell": (x, y), "energy": int}. An episode depends
    only on rules, number of agents, seed and actions.
    """

    metadata = METADATA

    def __init__(self, rules: str | os.PathLike = "repaired", agents: int = 4, steps: int = 500,
                 render_mode: str | None = None):
        if steps < 1:
            raise UsageError(f"{steps} steps; an episode has at least one")
        if render_mode not in (None, "ansi"):
            raise UsageError(f"no render mode '{render_mode}'; use ansi or None")
        self._handle = Handle(call(lib.shoal_world_new, encode(rules), agents, 1), lib.shoal_world_free,
                              closed_text="the world is closed")
        self._seed = 0
        self.steps, self.render_mode = steps, render_mode
        self.possible_agents = [f"agent_{i}" for i in range(agents)]
        self.agents: list[str] = []
        n_words = json.loads(self.state())["rules"]["words"]
        self.action_spaces = {a: Discrete(len(ACTIONS) * (n_words + 1)) for a in self.possible_agents}
        self.observation_spaces = {a: Text(OBSERVATION_MAX_LENGTH, charset=OBSERVATION_CHARACTERS)
                                   for a in self.possible_agents}

    def observation_space(self, agent: str) -> Text:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Discrete:
        return self.action_spaces[agent]

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        return len(self.possible_agents)

    @property
    def tick(self) -> int:
        """The number of steps of the episode."""
        with self._handle.use() as w:
            return lib.shoal_world_tick(w)

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict, dict]:
        """Begins an episode: observations, infos.

        seed: 0 to 2^63 - 1; None: the seed after the last one, at first 1
        options: none are defined
        """
        next_seed = self._seed + 1 if seed is None else int(seed)
        if not 0 <= next_seed < 2**63:
            raise UsageError(f"seed {next_seed}; a seed is 0 to 2^63 - 1")
        with self._handle.use() as w:
            call(lib.shoal_world_reset, w, next_seed)
        self._seed = next_seed
        return self._begin()

    def step(self, actions: Mapping[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        """One action of each agent of `agents`: observations, rewards, terminations, truncations, infos.

        Agents that are terminated or truncated leave `agents`.
        """
        acting = self.agents
        if set(actions) != set(acting):
            raise UsageError(f"actions of {sorted(actions)}; the agents are {acting}")
        if not acting:
            return {}, {}, {}, {}, {}
        array = ffi.new("int[]", len(self.possible_agents))
        for agent, action in actions.items():
            array[self._index(agent)] = int(action)
        with self._handle.use() as w:
            call(lib.shoal_world_step, w, array)
        states = {a: self.agent_state(a) for a in acting}
        is_over = self.tick >= self.steps
        terminations = {a: not states[a].alive for a in acting}
        truncations = {a: is_over and states[a].alive for a in acting}
        self.agents = [a for a in acting if not terminations[a] and not truncations[a]]
        return (self._observations(acting), {a: states[a].reward for a in acting}, terminations, truncations,
                self._infos(acting))

    def policy(self, name: str = "rule") -> dict[str, int]:
        """The actions of a scripted policy (rule, reflex, random or mock), one for each agent of `agents`."""
        array = ffi.new("int[]", len(self.possible_agents))
        with self._handle.use() as w:
            call(lib.shoal_world_policy, w, encode(name), array)
        return {a: array[self._index(a)] for a in self.agents}

    def parse(self, text: str) -> int | None:
        """The action that a model's answer names, or None."""
        with self._handle.use() as w:
            action = lib.shoal_world_parse(w, encode(text))
        return action if action >= 0 else None

    def agent_state(self, agent: str) -> AgentState:
        out = ffi.new("struct shoal_agent *")
        with self._handle.use() as w:
            call(lib.shoal_world_agent, w, self._index(agent), out)
        fields = {name: getattr(out, name) for name in AgentState._fields}
        return AgentState(**{**fields, "alive": bool(out.alive)})

    def state(self) -> str:
        """The whole state as JSON text: rules, seed and actions so far."""
        with self._handle.use() as w:
            return take_text(lib.shoal_world_state(w))

    def restore(self, state: str) -> tuple[dict, dict]:
        """Returns to a state of this world or of another with as many agents: observations, infos."""
        before = self.state()
        with self._handle.use() as w:
            call(lib.shoal_world_restore, w, encode(state))
            if lib.shoal_world_agents(w) != len(self.possible_agents):
                n = lib.shoal_world_agents(w)
                call(lib.shoal_world_restore, w, encode(before))
                raise UsageError(f"the state has {n} agents, the environment {len(self.possible_agents)}")
        self._seed = json.loads(state)["seed"]
        return self._begin()

    def render(self) -> str | None:
        """The map as text."""
        if self.render_mode is None:
            return None
        with self._handle.use() as w:
            return ffi.string(lib.shoal_world_draw(w)).decode()

    def close(self) -> None:
        self._handle.close()

    def _begin(self) -> tuple[dict, dict]:
        is_over = self.tick >= self.steps
        self.agents = [a for a in self.possible_agents if not is_over and self.agent_state(a).alive]
        return self._observations(self.agents), self._infos(self.agents)

    def _index(self, agent: str) -> int:
        if agent not in self.action_spaces:
            raise UsageError(f"no agent '{agent}'")
        return int(agent[len("agent_"):])

    def _observations(self, agents: list[str]) -> dict[str, str]:
        with self._handle.use() as w:
            return {a: ffi.string(lib.shoal_world_observe(w, self._index(a))).decode() for a in agents}

    def _infos(self, agents: list[str]) -> dict[str, dict[str, Any]]:
        return {a: self._info(a) for a in agents}

    def _info(self, agent: str) -> dict[str, Any]:
        with self._handle.use() as w:
            prompt = ffi.string(lib.shoal_world_prompt(w, self._index(agent))).decode()
        state = self.agent_state(agent)
        return {"prompt": prompt, "cell": (state.x, state.y), "energy": state.energy}


class GridWorldAgent(Env):
    """A GridWorld for one agent, "agent_0", as a Gymnasium environment. The others follow a scripted policy.

    policy: rule, reflex, random or mock
    options: those of GridWorld
    """

    metadata = METADATA

    def __init__(self, policy: str = "rule", **options: Any):
        self.world = GridWorld(**options)
        self.policy, self.render_mode = policy, self.world.render_mode
        self.agent = self.world.possible_agents[0]
        self.world.policy(policy)  # raises UsageError if the name is unknown
        self.observation_space = self.world.observation_space(self.agent)
        self.action_space = self.world.action_space(self.agent)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict]:
        """Begins an episode: observation, info. Arguments: those of GridWorld.reset."""
        if Env is not object:
            super().reset(seed=seed)
        observations, infos = self.world.reset(seed, options)
        return observations[self.agent], infos[self.agent]

    def step(self, action: int) -> tuple[str, float, bool, bool, dict]:
        """observation, reward, terminated, truncated, info"""
        if self.agent not in self.world.agents:
            raise UsageError("the episode has ended; call reset")
        results = self.world.step({**self.world.policy(self.policy), self.agent: action})
        observation, reward, terminated, truncated, info = (r[self.agent] for r in results)
        return observation, reward, terminated, truncated, info

    def render(self) -> str | None:
        return self.world.render()

    def close(self) -> None:
        self.world.close()
