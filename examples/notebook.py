# %% [markdown]
# # Shoal from Python
#
# A notebook as a script: VS Code, Jupytext and Spyder show its cells. It runs in the folder that has models/fry and
# data, in about a minute, and keeps its files in a temporary folder.

# %%
import random
import tempfile
from pathlib import Path

import numpy as np

import shoal
from shoal.env import GridWorld, GridWorldAgent

model = shoal.Model("models/fry", threads=2, exact=True)
folder = Path(tempfile.mkdtemp(prefix="shoal-"))
print(f"{model.info['name']}: {model.info['parameters']:,} parameters, class {model.info['class']}")

# %% [markdown]
# ## Generate
# A str is a user's message. `choose` gives the exact probability of each answer.

# %%
question = "pick the smallest of 41, 3, 907"
print(question, "->", model.run(question).text)
for piece in model.stream("sort: k b x"):
    print(piece, end="|")
print()
reply = model.choose(question, ["answer: 3", "answer: 41", "answer: 907"])
print(reply.text, np.round(reply.probabilities, 3))

# %% [markdown]
# ## Train two adapters
# Both are trained in one pass of the base model.

# %%
def show(task, done, total, seconds, detail):
    if total and done % 20 == 0:
        print(f"  {task} {done}/{total}, {seconds:.0f} s  {detail}")


data = {name: f"data/personas/{name}.jsonl" for name in ("critic", "explorer")}
for result in model.train(data, folder / "adapters", r=4, lr=4e-3, max_steps=40, seed=1, progress=show):
    print(f"{result['adapter']}: loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}, {result['hash'][:12]}")
adapters = {name: model.load_adapter(folder / "adapters" / name) for name in data}

# %% [markdown]
# ## Evaluate
# The same held-out questions for all, with 95 % intervals and paired differences to the base model.

# %%
for row in model.evaluate(adapters, tasks="pick", n=200):
    text = f"{row['adapter']:10} {row['acc']:6.1%}  [{row['lo']:.1%}, {row['hi']:.1%}]"
    if "difference" in row:
        d = row["difference"]
        text += f"  difference {d['value']:+.1%} [{d['lo']:+.1%}, {d['hi']:+.1%}], p = {d['p_holm']:.2g}"
    print(text)

# %% [markdown]
# ## Debate

# %%
topic = "pick the smaller of 412 and 907"
transcript = model.debate({**adapters, "base": None}, topic=topic, choices=["412", "907"], rounds=2, seed=1)
for turn in transcript["said"]:
    print(f"round {turn['round']} {turn['name']:10} {turn['answer']} ({turn['confidence']:.2f})")
print("answer:", transcript["answer"])

# %% [markdown]
# ## Evolve with your own fitness
# The fitness of a candidate is the probability of the right answer, on questions that change in each generation.

# %%
def fitness_of(seed, n_items):
    rng = random.Random(seed)
    pairs = [rng.sample(range(1000), 2) for _ in range(n_items)]

    def fitness(names, candidates):
        requests = [{"prompt": f"pick the smaller of {a} and {b}", "choices": [f"answer: {a}", f"answer: {b}"],
                     "adapter": adapter} for adapter in candidates for a, b in pairs]
        right = [a > b for _ in candidates for a, b in pairs]
        replies = model.run_batch(requests)
        return np.reshape([r.probabilities[int(i)] for r, i in zip(replies, right)], (len(names), n_items))

    return fitness


population = model.population(adapters, population=6, elites=2, seed=1)
for generation in range(3):
    population.evaluate(fitness_of(generation, 40), items=40)
    best = population.info["candidates"][0]
    print(f"generation {generation}: best {best['name']}, fitness {best['fitness']['value']:.3f}, of {population.names}")
    if generation < 2:
        population.breed()
population.best.save(folder / "best")
print(model.load_adapter(folder / "best").lineage)

# %% [markdown]
# ## An episode in the grid world
# First by a scripted policy, then with the model as the policy of one agent.

# %%
world = GridWorld(agents=4, steps=200, render_mode="ansi")
world.reset(seed=7)
while world.agents:
    world.step(world.policy("rule"))
print(world.render())
print("delivered by rule:", [world.agent_state(agent).delivered for agent in world.possible_agents])

env = GridWorldAgent(policy="rule", agents=4, steps=30)
observation, info = env.reset(seed=7)
words = [" north", " south", " east", " west", " pick", " drop"]  # the actions in their order
total, truncated, terminated = 0.0, False, False
while not truncated and not terminated:
    action = model.run(text=info["prompt"], choices=words).choice
    observation, reward, terminated, truncated, info = env.step(action)
    total += reward
print(f"reward of the untrained model in 30 steps: {total:.1f}")

# %%
model.close()
print("files:", folder)
