"""The environments, against the APIs of PettingZoo (ParallelEnv) and Gymnasium (Env)."""
import random
import unittest

from support import ROOT

import shoal
from shoal.env import ACTIONS, GridWorld, GridWorldAgent


def play(env, seed, policy="rule", limit=10**6):
    """The whole episode as a list of the results of `step`."""
    env.reset(seed=seed)
    steps = []
    while env.agents and len(steps) < limit:
        steps.append(env.step(env.policy(policy)))
    return steps


class ParallelApi(unittest.TestCase):
    def setUp(self):
        self.env = GridWorld(agents=4, steps=30, render_mode="ansi")
        self.addCleanup(self.env.close)

    def test_spaces(self):
        env = self.env
        self.assertEqual(env.possible_agents, ["agent_0", "agent_1", "agent_2", "agent_3"])
        self.assertEqual((env.max_num_agents, env.num_agents), (4, 0))
        for agent in env.possible_agents:
            self.assertIs(env.action_space(agent), env.action_space(agent))
            self.assertIs(env.observation_space(agent), env.observation_space(agent))
            self.assertEqual(env.action_space(agent).n, len(ACTIONS))
            self.assertIn(env.action_space(agent).sample(), env.action_space(agent))
        self.assertEqual(GridWorld(ROOT / "worlds" / "talk.yaml").action_space("agent_0").n, len(ACTIONS) * 9)

    def check_keys(self, agents, *results):
        for result in results:
            self.assertEqual(list(result), agents)

    def test_an_episode(self):
        env = self.env
        observations, infos = env.reset(seed=7)
        self.check_keys(env.possible_agents, observations, infos)
        for tick in range(30):
            acting = env.agents
            self.assertEqual(env.tick, tick)
            observations, rewards, terminations, truncations, infos = env.step(env.policy("reflex"))
            self.check_keys(acting, observations, rewards, terminations, truncations, infos)
            for a in acting:
                self.assertIn(observations[a], env.observation_space(a))
                self.assertIsInstance(rewards[a], float)
                self.assertIs(type(terminations[a]), bool)
                self.assertIs(type(truncations[a]), bool)
                self.assertEqual(set(infos[a]), {"prompt", "cell", "energy"})
            self.assertEqual(env.agents, [a for a in acting if not terminations[a] and not truncations[a]])
        self.assertEqual(env.agents, [])
        self.assertTrue(all(truncations.values()))
        self.assertEqual(env.step({}), ({}, {}, {}, {}, {}))

    def test_agents_that_die_leave(self):
        env = GridWorld(agents=6, steps=2000)
        env.reset(seed=1)
        died = set()
        while env.agents:
            acting = env.agents
            _, _, terminations, truncations, _ = env.step(env.policy("random"))
            for a in acting:
                self.assertFalse(terminations[a] and truncations[a])
                if terminations[a]:
                    self.assertFalse(env.agent_state(a).alive)
                    died.add(a)
            self.assertFalse(died & set(env.agents))
        self.assertTrue(died)

    def test_seeds(self):
        a, b, c = play(self.env, 7), play(GridWorld(agents=4, steps=30), 7), play(self.env, 8)
        self.assertEqual(a, b)
        self.assertNotEqual(a, c)
        following = GridWorld(agents=4, steps=30)
        self.assertEqual(following.reset()[0], GridWorld(agents=4).reset(seed=1)[0])
        self.assertEqual(following.reset()[0], GridWorld(agents=4).reset(seed=2)[0])
        for seed in (-1, 2**63):
            with self.assertRaises(shoal.UsageError):
                self.env.reset(seed=seed)

    def test_state_and_restore(self):
        play(self.env, 3, limit=10)
        state = self.env.state()
        rest = [self.env.step(self.env.policy()) for _ in range(5)]
        other = GridWorld(agents=4, steps=30)
        observations, infos = other.restore(state)
        self.check_keys(other.agents, observations, infos)
        self.assertEqual([other.step(other.policy()) for _ in range(5)], rest)
        two = GridWorld(agents=2)
        two.reset(seed=5)
        before = two.state()
        with self.assertRaisesRegex(shoal.UsageError, "4 agents"):
            two.restore(state)
        self.assertEqual(two.state(), before)
        with self.assertRaises(shoal.FormatError):
            two.restore("{")

    def test_wrong_actions(self):
        self.env.reset(seed=1)
        everyone = self.env.policy()
        for actions in ({}, {**everyone, "agent_9": 0}, {**everyone, "agent_0": 6}, {**everyone, "agent_0": -1}):
            with self.subTest(actions), self.assertRaises(shoal.UsageError):
                self.env.step(actions)
        self.assertEqual(self.env.tick, 0)
        with self.assertRaisesRegex(shoal.UsageError, "no policy"):
            self.env.policy("x")
        with self.assertRaises(shoal.UsageError):
            self.env.agent_state("agent_9")

    def test_wrong_arguments(self):
        for arguments in ({"agents": 0}, {"agents": 65}, {"steps": 0}, {"render_mode": "human"}, {"rules": "nothing"}):
            with self.subTest(arguments), self.assertRaises(shoal.Error):
                GridWorld(**arguments)

    def test_texts(self):
        self.env.reset(seed=1)
        self.assertEqual(len(self.env.render().strip().splitlines()), 20)
        self.assertIsNone(GridWorld().render())
        self.assertEqual(self.env.parse("I go north"), ACTIONS.index("move_north"))
        self.assertIsNone(self.env.parse("hello"))

    def test_a_closed_world(self):
        env = GridWorld()
        env.close()
        env.close()
        with self.assertRaisesRegex(shoal.StateError, "closed"):
            env.reset()

    def test_rule_sets(self):
        for rules in ["legacy", *sorted((ROOT / "worlds").glob("*.yaml"))]:
            env = GridWorld(rules, agents=3, steps=60)
            env.reset(seed=2)
            rng = random.Random(1)
            with self.subTest(rules):
                while env.agents:
                    actions = {a: rng.randrange(env.action_space(a).n) for a in env.agents}
                    for a, observation in env.step(actions)[0].items():
                        self.assertIn(observation, env.observation_space(a))

    def test_the_test_of_pettingzoo(self):
        try:
            from pettingzoo.test import parallel_api_test
        except ImportError:
            self.skipTest("pettingzoo is not installed")
        parallel_api_test(GridWorld(agents=4, steps=100), num_cycles=1000)


class GymnasiumApi(unittest.TestCase):
    def test_an_episode(self):
        env = GridWorldAgent(policy="reflex", agents=3, steps=20)
        observation, info = env.reset(seed=4)
        self.assertIn(observation, env.observation_space)
        world = GridWorld(agents=3, steps=20)
        self.assertEqual(world.reset(seed=4)[0]["agent_0"], observation)
        for tick in range(20):
            observation, reward, terminated, truncated, info = env.step(tick % 4)
            expected = world.step({**world.policy("reflex"), "agent_0": tick % 4})
            self.assertEqual((observation, reward, terminated, truncated, info), tuple(r["agent_0"] for r in expected))
        self.assertEqual((terminated, truncated), (False, True))
        with self.assertRaisesRegex(shoal.UsageError, "reset"):
            env.step(0)
        env.close()

    def test_wrong_policy(self):
        with self.assertRaisesRegex(shoal.UsageError, "no policy"):
            GridWorldAgent(policy="x")

    def test_the_test_of_gymnasium(self):
        try:
            from gymnasium.utils.env_checker import check_env
        except ImportError:
            self.skipTest("gymnasium is not installed")
        check_env(GridWorldAgent(steps=50), skip_render_check=True)


if __name__ == "__main__":
    unittest.main()
