"""Text -> token ids -> batches of windows; and what all commands share: errors, files, devices.

    Tokenizer        bytes <-> token ids: single bytes, a BPE that is trained here, or GPT-2's
    open_corpus      a text file, a folder of them, or texts of Python -> Corpus; prepared once, kept in data/
    Corpus           the ids of training and of validation, and the tokenizer that made them
    Windows          ids -> batches of windows, a function of seed and step

    tokens, ids      arrays of token ids, memory-mapped uint16 (uint32 beyond 65,536 tokens)
    documents        [(name, bytes)], of which some are held out for validation
    T                the window, in tokens; a row of a batch has T+1, the last one only as a target

A prepared folder holds

    train.bin, val.bin    token ids, one after the other, in nanoGPT's format
    tokenizer.json        name, pattern and the bytes of each token
    meta.json             where the text came from, its size, and the type of the ids

A folder of nanoGPT, which has only the first two, is taken as it is: its ids are GPT-2's.

    python data.py                                   prepare pydocs and show what is in it
    python data.py --data my_texts --tokenizer bpe   prepare a text
"""

import ast
import base64
import gc
import hashlib
import json
import os
import re
import signal
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from pydoc_data.topics import topics
from stat import S_ISREG

import numpy as np
import pydantic
import regex
import tiktoken
import torch
import tyro
from safetensors import SafetensorError

# How GPT-2 cuts a text into words, within which BPE merges.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The tokenizers that a file may hold. No other pattern is run: a regular expression can take for ever.
PATTERNS = {"bytes": r"[\s\S]", "bpe": WORDS, "gpt2": WORDS}
BLANKS = re.compile(r"(\s{100000})")  # so long a run overflows tiktoken's stack
INVALID = re.compile("([\udc80-\udcff]+)")  # how surrogateescape writes bytes that are not UTF-8

PACKAGES = ("numpy", "torch", "matplotlib", "sympy", "networkx")  # of SOURCES; torch brings the last two
LINES = (".jsonl", ".parquet")  # many texts in a file, for python -m lab corpus
NO_TEXT = (".json", ".csv")  # data with a structure, which nobody wants to learn
ID_TYPES = ("uint8", "uint16", "uint32", "uint64")  # that a .bin file may have
BPE_BYTES = 10**7  # that a BPE is trained on


# -- Errors, files, devices ------------------------------------------------------------------------


class UserError(Exception):
    """What a user can mend: wrong input, a missing file, a full disk. It says what is wrong and the way
    out, and a command ends with this one line. Every other error is a bug and keeps its traceback."""


def one_line(error):
    """An error's message in one line; of pydantic's each field, its value and what is wrong with it."""
    if not isinstance(error, pydantic.ValidationError):
        return " ".join((str(error) or repr(error)).split())[:400]
    found = [(".".join(map(str, e["loc"])), e["input"], e["msg"]) for e in error.errors()[:3]]
    return "; ".join(
        f"{name} = {value!r:.80}: {message}" if name else message.removeprefix("Value error, ")
        for name, value, message in found
    )


@contextmanager
def reading(file, way_out=""):
    """What is wrong with a file that is read within it becomes a UserError that names it."""
    wrong = OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError
    try:
        yield
    except (*wrong, SafetensorError, UnpicklingError) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}{way_out}") from None


def read_json(file):
    """A file with a JSON object. UserError: it is missing or damaged."""
    with reading(file):
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        return {**content}  # TypeError unless it is an object


def write_whole(file, write):
    """Let `write(part)` make a file and put it in the place of another: whole, or not at all.
    UserError: the disk is full, or the place cannot be written."""
    part = Path(f"{file}.tmp")
    try:
        write(part)
        os.replace(part, file)
    except BrokenPipeError:  # of a line of progress, not of this file
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch has no class for a full disk
        raise UserError(f"cannot write {file}: {one_line(error)}") from None
    finally:
        part.unlink(missing_ok=True)


def write_json(file, content):
    write_whole(file, lambda part: part.write_text(json.dumps(content, indent=2) + "\n"))


def newest_run(out="out", otherwise=None):
    """The run whose weights are the newest, out/<name>. UserError: there is none, and nothing `otherwise`."""
    with reading(out):
        places = list(Path(out).iterdir()) if Path(out).exists() else []
        runs = [run for run in places if (run / "model.safetensors").exists()]
    if not (runs or otherwise):
        raise UserError(f"there is no trained model in {out}/ yet: python train.py trains one")
    return max(runs, key=lambda run: (run / "model.safetensors").stat().st_mtime, default=otherwise)


def pick_device(name="auto"):
    """'auto' -> CUDA, else MPS, else the CPU; or a device by its name. UserError: it is not here."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else mps
    try:
        torch.zeros(1, device=name).cpu()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError):  # a wrong name, or no such device
        raise UserError(f"device {name!r} is not here: leave --device out, or give cpu") from None


def command_line(main):
    """Run a command: an error that the user can mend is one line, and no stack trace."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's has it not
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show is spelled out
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: files that are half written are removed
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, pydantic.ValidationError, SafetensorError) as error:
        sys.exit(f"error: {one_line(error)}")
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and "can't allocate memory" not in str(error):  # what torch says on a CPU
            raise
        sys.exit("error: there is not enough memory: ask for fewer or smaller things at once")
    except OSError as error:
        if not error.filename:  # not about a file that the user named
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")


# -- Tokenizers ------------------------------------------------------------------------------------


class Tokenizer:
    """Bytes <-> token ids. Any bytes come back as they were."""

    def __init__(self, name, tokens):
        """`tokens` are the bytes of token 0, 1, ..; the end of a text comes after them."""
        self.name, self.pattern, self.tokens = name, PATTERNS[name], tokens
        self.end_of_text, self.vocab_size = len(tokens), len(tokens) + 1
        ranks, special = {token: i for i, token in enumerate(tokens)}, {"<|endoftext|>": len(tokens)}
        self.encoding = tiktoken.Encoding(
            name, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=special
        )

    @classmethod
    def named(cls, name):
        """'bytes', one token each, or 'gpt2', which tiktoken fetches once. UserError: it cannot."""
        if name == "bytes":
            return cls(name, [bytes([i]) for i in range(256)])
        try:
            gpt2 = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on whatever its download raised
            raise UserError(
                f"gpt2's vocabulary could not be fetched ({type(error).__name__}): it needs the network "
                "once; without it take --tokenizer bytes or --tokenizer bpe"
            ) from None
        return cls("gpt2", [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)])

    @classmethod
    def train(cls, texts, vocab_size):
        """A BPE of `vocab_size` tokens, the end of a text included. texts: bytes; of more than BPE_BYTES
        every n-th piece."""
        if vocab_size <= 257:  # the 256 bytes, the end of a text, and no merge
            raise UserError(f"--vocab-size {vocab_size} is too small for a BPE: give over 257")
        every = -(-sum(map(len, texts)) // BPE_BYTES) or 1
        pieces = [piece for text in texts for piece in pieces_of(text)][::every]  # from everywhere
        words = Counter(x for piece in pieces for x in regex.findall(WORDS, piece.decode("utf-8", "ignore")))
        return cls("bpe", merge_pairs(words, vocab_size - 1))

    def encode(self, text):
        """str or bytes -> list of ids. Nothing in a text is taken for its end."""
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        if self.name == "bytes":
            return list(data)
        ids = []
        for i, part in enumerate(INVALID.split(data.decode("utf-8", "surrogateescape"))):
            if i % 2:  # bytes that are not UTF-8: one token each
                part = part.encode("utf-8", "surrogateescape")
                ids += [self.encoding.encode_single_token(bytes([byte])) for byte in part]
            else:
                ids += [x for piece in BLANKS.split(part) for x in self.encoding.encode_ordinary(piece)]
        return ids

    def decode(self, ids):
        """ids -> bytes. A token may hold a part of a character, so turn only the whole into str."""
        ids = [i for i in map(int, ids) if i < self.vocab_size]  # others are padding
        return self.encoding.decode_bytes(ids)

    def fields(self):
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return {"name": self.name, "pattern": self.pattern, "tokens": tokens}

    def save(self, file):
        write_whole(file, lambda part: part.write_text(json.dumps(self.fields())))

    @property
    def digest(self):
        """8 characters that tell it from others."""
        return hashlib.sha256(json.dumps(self.fields()).encode()).hexdigest()[:8]


def merge_pairs(words, size):
    """Byte-pair encoding (Sennrich et al., arXiv 1508.07909): {word: count} -> the bytes of `size` tokens.

    Again and again the most frequent pair of neighbours within words becomes a token; of several the one
    with the smallest ids. There are fewer tokens where nothing is left to merge.
    """
    tokens, times = [bytes([i]) for i in range(256)], [*words.values()]
    words = [list(word.encode()) for word in words]  # each as ids
    counts, places = Counter(), defaultdict(set)  # of each pair: how often; words that have or had it

    def count(i, sign):
        for pair in pairwise(words[i]):
            counts[pair] += sign * times[i]
            places[pair].add(i)

    for i in range(len(words)):
        count(i, 1)
    heap = [(-n, pair) for pair, n in counts.items()]
    heapify(heap)
    show = progress(f"training a BPE of {size + 1} tokens")
    while heap and len(tokens) < size:
        n, (a, b) = heappop(heap)
        if -n != counts[a, b]:  # merges have made it rarer
            heappush(heap, (-counts[a, b], (a, b)))
        elif n:
            made, new = set(), len(tokens)
            tokens.append(tokens[a] + tokens[b])
            for i in places.pop((a, b)):
                count(i, -1)
                words[i] = merged(words[i], a, b, new)
                count(i, 1)
                made.update(pair for pair in pairwise(words[i]) if new in pair)
            for pair in made:
                heappush(heap, (-counts[pair], pair))
            show(len(tokens) / size)
    return tokens


def merged(ids, a, b, new):
    """ids with `new` in the place of each a that b follows, from the left."""
    found = []
    for x in ids:
        if x == b and found[-1:] == [a]:
            found[-1] = new
        else:
            found.append(x)
    return found


def load_tokenizer(file):
    """What a tokenizer's `save` wrote. UserError: there is none, or a damaged one, or something else."""
    fields = read_json(file)
    with reading(file):
        if fields.get("name") not in PATTERNS:
            raise UserError(f"{file} is none of {', '.join(PATTERNS)}; python -m lab may read it")
        if fields["pattern"] != PATTERNS[fields["name"]]:
            raise ValueError("its pattern is another one")
        tokens = [base64.b64decode(token, validate=True) for token in fields["tokens"]]
        if len(set(tokens)) < len(tokens) or b"" in tokens:
            raise ValueError("a token is there twice, or empty")
        single = [bytes([i]) for i in range(256)]
        if not set(single) <= set(tokens) or (fields["name"] == "bytes" and tokens != single):
            raise ValueError("a byte has no token, or another one than its own")
        return Tokenizer(fields["name"], tokens)


# -- Sources of text -------------------------------------------------------------------------------


def package_files():
    """Python files, tests left out, of the standard library and of PACKAGES where they are: (name, path)."""
    folders = {"python": Path(sysconfig.get_paths()["stdlib"])}
    folders |= {name: Path(find_spec(name).origin).parent for name in PACKAGES if find_spec(name)}
    if missing := [name for name in PACKAGES if name not in folders]:
        print(f"note: {', '.join(missing)} not installed: the text is shorter")
    skip = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
    for name, folder in folders.items():
        for file in sorted(folder.rglob("*.py")):
            if not skip & set(file.relative_to(folder).parts):
                yield f"{name}/{file.relative_to(folder).as_posix()}", file


def pysource():
    """Python files whole: 80 to 90 MB, for models that read much."""
    return [(name, text) for name, file in package_files() if (text := file.read_bytes()).strip()]


def pydocs():
    """The docstrings of the same files, each only once, and Python's help topics: a document a file."""
    files, sources, documents, seen = [*package_files()], [], [], set()
    show = progress(f"reading docstrings of {len(files):,} files")
    gc.disable()  # it would look through all syntax trees again and again: half of the time
    try:
        for i, (name, file) in enumerate(files):
            sources.append((name, docstrings(file)))
            show(i / len(files))
    finally:
        gc.enable()
    sources += [(f"topics/{topic}", [text]) for topic, text in topics.items()]
    for name, texts in sources:
        if new := [text for text in dict.fromkeys(texts) if text not in seen]:
            seen.update(new)
            documents.append((name, "\n\n".join(new).encode("utf-8", "replace")))
    return documents


def docstrings(file):
    """The docstrings of one Python file, in the order of the source."""
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's strings
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # of another Python
        return []
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))  # ast.walk goes level by level
    return [text for text in map(ast.get_docstring, nodes) if text]


SOURCES = {"pydocs": pydocs, "pysource": pysource}


def files_below(folder, seen=None):
    """The files of a folder and of those below it, by name; hidden ones left out, links followed once.
    OSError: a folder that cannot be entered, a link that leads nowhere. seen: folders that were entered."""
    seen, files = set() if seen is None else seen, []
    if (real := folder.resolve()) not in seen:
        seen.add(real)
        for path in sorted(path for path in folder.iterdir() if path.name[0] != "."):
            if path.is_dir():
                files += files_below(path, seen)
            elif S_ISREG(path.stat().st_mode):  # a pipe is none
                files.append(path)
    return files


def read_texts(path):
    """The text of a file, or of the files of a folder: (name, bytes), by name. Left out, and named, are files
    with zero bytes, which no text has, and those of NO_TEXT. UserError: a file of LINES. OSError: one that
    cannot be read."""
    files = [path] if path.is_file() else files_below(path)
    texts, others, foreign = [], [], []
    for file in files:
        if file.suffix.lower() in LINES:
            raise UserError(f"{file} holds many texts: python -m lab corpus prepares such files, alone")
        name = str(file.relative_to(path.parent))
        if file.suffix.lower() in NO_TEXT or b"\0" in (text := file.read_bytes()):
            others.append(name)
        elif text.strip():
            texts.append((name, text))
            if INVALID.search(text.decode("utf-8", "surrogateescape")):
                foreign.append(name)
    for names, what in ((others, "hold no text, left out"), (foreign, "are not UTF-8, read byte by byte")):
        if names:
            print(f"note: {len(names)} of {len(files)} files {what}: {', '.join(names[:3])}")
    return texts


# -- Documents -> files of ids ---------------------------------------------------------------------


def progress(what):
    """Say what begins -> a function that shows the share that is done, if somebody is looking."""
    print(what, flush=True)
    return lambda share: sys.stdout.isatty() and print(f"{share:4.0%}\r", end="", flush=True)


def divide(documents):
    """Documents -> texts of training and of validation.

    Validation takes one document in 20, by the hash of its name, so that no text has its neighbours on
    the other side. Of fewer than 100 documents, or where that leaves a side empty, the last tenth of each,
    one byte at least: a text that is cut so has an end on both sides.
    """
    train, val = [], []
    for name, text in documents:
        digest = hashlib.sha1(name.encode("utf-8", "surrogateescape")).hexdigest()
        (train if int(digest, 16) % 20 else val).append(text)
    if len(documents) < 100 or not (train and val):
        cuts = [(text, len(text) - max(len(text) // 10, 1)) for _, text in documents]
        train, val = [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    return train, val


def pieces_of(text):
    """A text in pieces of at most 1 MB, cut behind a line where there is one."""
    start = 0
    while start < len(text):
        end = min(start + 10**6, len(text))
        if end < len(text):
            end = text.rfind(b"\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def id_type(vocab_size):
    """The type of the ids in a .bin file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write_tokens(texts, tokenizer, file):
    """Encode texts, each followed by the end of a text, into a file of ids."""
    kind, size, done = id_type(tokenizer.vocab_size), sum(map(len, texts)), 0
    show = progress(f"encoding {size / 1e6:.1f} MB")
    with open(file, "wb") as out:
        for text in texts:
            for piece in pieces_of(text):
                out.write(np.array(tokenizer.encode(piece), kind).tobytes())
                show((done := done + len(piece)) / size)
            out.write(np.array([tokenizer.end_of_text], kind).tobytes())


@contextmanager
def new_folder(folder):
    """Give a folder to fill, which is then `folder`: whole, or not at all, also where another program has
    made that one meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
        half = Path(temporary, "half")
        half.mkdir()
        yield half
        try:
            half.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def write_corpus(folder, source, documents, tokenizer):
    """A prepared folder. `source` tells where the documents came from."""
    train, val = divide(documents)
    with new_folder(folder) as half:
        write_whole(half / "train.bin", lambda part: write_tokens(train, tokenizer, part))
        write_whole(half / "val.bin", lambda part: write_tokens(val, tokenizer, part))
        tokenizer.save(half / "tokenizer.json")
        meta = {"source": source, "bytes": sum(len(text) for _, text in documents)}
        meta |= {"val_bytes": sum(map(len, val)), "dtype": id_type(tokenizer.vocab_size).name}
        write_json(half / "meta.json", meta)


# -- Corpora ---------------------------------------------------------------------------------------


@dataclass
class Corpus:
    """What a model is trained and measured on."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int  # of the model: large tables are padded, for the GPU's matrix products
    train: np.ndarray  # ids
    val: np.ndarray
    source: str  # where it came from, for people
    val_bytes: int | None = None  # of the validation text, where that is known

    @property
    def fingerprint(self):
        """What tells it from others: hashes of the first and last 10^6 ids, since there may be gigabytes."""
        known = {"name": self.name, "train_tokens": len(self.train), "val_tokens": len(self.val)}
        for name, ids in (("sha256", self.train), ("val_sha256", self.val)):
            known[name] = hashlib.sha256(np.concatenate([ids[: 10**6], ids[-(10**6) :]])).hexdigest()
        return known | {"tokenizer": self.tokenizer.digest}


def open_corpus(data: str = "pydocs", tokenizer: str | None = None, vocab_size: int = 4096):
    """A corpus to train on. A text is encoded once; later calls find it in data/.

    Args:
        data: 'pydocs', 'pysource', a text file, a folder of texts, or a folder with train.bin and val.bin.
        tokenizer: 'bytes', 'bpe' (trained on the text) or 'gpt2'; None: a .bin folder's own, bytes for text.
        vocab_size: of 'bpe'.

    UserError: no text, ids that are damaged, or a tokenizer that is not known or does not fit.
    """
    if tokenizer not in (None, "bytes", "bpe", "gpt2"):
        raise UserError(f"--tokenizer {tokenizer} is not known: give bytes, bpe or gpt2")
    if data and is_prepared(data):
        folder, tokenizer = Path(data), tokenizer_of(Path(data), tokenizer)
    else:
        folder = prepare(data, tokenizer or "bytes", vocab_size)
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    return read_corpus(folder, tokenizer)


def read_corpus(folder, tokenizer):
    """A folder with train.bin and val.bin -> Corpus."""
    meta = read_json(folder / "meta.json") if (folder / "meta.json").exists() else {}
    V = tokenizer.vocab_size
    train, val = (open_ids(folder / f"{split}.bin", meta.get("dtype"), V) for split in ("train", "val"))
    padded = V if V < 1024 else -(-V // 64) * 64
    source = f"{folder}: {meta.get('source', 'token ids as they were found')}"
    return Corpus(folder.absolute().name, tokenizer, padded, train, val, source, meta.get("val_bytes"))


def is_prepared(folder):
    """Whether a folder holds token ids already."""
    return any(Path(folder, f"{split}.bin").is_file() for split in ("train", "val"))


def prepare(data, tokenizer, vocab_size):
    """The prepared folder of a text, made if it is not there."""
    path, documents = Path(data), None
    if data in SOURCES:
        versions = (f"{name} {version(name)}" for name in PACKAGES if find_spec(name))
        source = ", ".join([data, f"Python {sys.version.split()[0]}", *versions])
    elif not data or not path.exists():
        raise UserError(f"--data {data!r} is no file or folder, and none of {', '.join(SOURCES)}")
    elif documents := read_texts(path):
        digests = [(name, hashlib.sha256(text).hexdigest()) for name, text in documents]
        source = f"{path.name} {hashlib.sha256(repr(digests).encode()).hexdigest()}"
    else:
        raise UserError(f"{data} holds no text; give a file or folder with some")
    kind = f"bpe{vocab_size}" if tokenizer == "bpe" else tokenizer
    digest = hashlib.sha256(f"{source} {kind}".encode("utf-8", "surrogateescape")).hexdigest()[:8]
    folder = Path("data", f"{path.stem}-{kind}-{digest}")
    if not folder.exists():
        encoder = None if tokenizer == "bpe" else Tokenizer.named(tokenizer)  # fails before a text is read
        documents = documents or SOURCES[data]()
        encoder = encoder or Tokenizer.train(divide(documents)[0], vocab_size)
        write_corpus(folder, source, documents, encoder)
    return folder


def tokenizer_of(folder, name):
    """The tokenizer of a folder with train.bin and val.bin: as named, or its own, or GPT-2's."""
    if name == "bpe":
        raise UserError(f"{folder} holds token ids already; a BPE cannot be trained on them")
    if name is None and (folder / "tokenizer.json").exists():
        return load_tokenizer(folder / "tokenizer.json")
    if name is None and (folder / "meta.pkl").exists():
        raise UserError(f"{folder / 'meta.pkl'} is not read: give the text that was encoded, --data FILE")
    return Tokenizer.named(name or "gpt2")


def open_ids(file, stated, vocab_size):
    """The ids of a .bin file, memory-mapped. `stated` is the name of their type; None: of the vocabulary.
    UserError: it is missing, of another type, or has ids beyond the vocabulary in its first 10^9."""
    kind = id_type(vocab_size).name if stated is None else stated
    if kind not in ID_TYPES:  # bytes become what numpy is told: also pointers
        raise UserError(f"{file.with_name('meta.json')}: dtype = {kind!r} is none of {', '.join(ID_TYPES)}")
    with reading(file, "; a prepared folder has train.bin and val.bin"):
        ids = np.memmap(file, kind, mode="r")
    if kind == "uint16" and len(ids) % 2 == 0 and not ids[1 : 10**6 : 2].any():  # text has no such zeros
        raise UserError(f'{file} looks like uint32, not {kind}: say so in meta.json, {{"dtype": "uint32"}}')
    if (largest := int(ids[: 10**9].max())) >= vocab_size:
        beyond = f"{file} has token id {largest}, beyond the vocabulary of {vocab_size}"
        raise UserError(f"{beyond}; name its tokenizer, for instance --tokenizer gpt2")
    return ids


def unigram_entropy(tokens, vocab_size):
    """Entropy of the token frequencies in nats: the loss of knowing them and nothing else."""
    pieces = (tokens[i : i + 10**7].astype(np.int64) for i in range(0, len(tokens), 10**7))
    p = sum(np.bincount(piece, minlength=vocab_size) for piece in pieces) / len(tokens)
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


# -- Batches ---------------------------------------------------------------------------------------


class Windows:
    """Windows in an order that `seed` says. Each epoch visits each once, reshuffled.

    Windows do not overlap: window w is tokens w T .. w T + T, the last one only as a target.
    """

    def __init__(self, tokens, block_size, seed):
        if len(tokens) <= block_size:
            few = f"{getattr(tokens, 'filename', 'the text')} has {len(tokens)} tokens, no more than a window"
            raise UserError(f"{few} of {block_size}: give more text, or a smaller --block-size")
        self.tokens, self.block_size, self.seed = tokens, block_size, seed
        self.count = (len(tokens) - 1) // block_size
        self.epoch = None

    def window(self, i):
        """The i-th window, counted through all epochs: (T+1,) int64."""
        epoch, i = divmod(i, self.count)
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng((self.seed, epoch)).permutation(self.count)
        start = self.order[i] * self.block_size
        return self.tokens[start : start + self.block_size + 1].astype(np.int64)

    def stack(self, first, end):
        """The windows first .. end-1, (end - first, T+1)."""
        return torch.from_numpy(np.stack([self.window(i) for i in range(first, end)]))


def main():
    corpus = tyro.cli(open_corpus, description=__doc__)
    print(corpus.source)
    for split, ids in (("train", corpus.train), ("val", corpus.val)):
        entropy = unigram_entropy(ids, corpus.vocab_size)
        print(f"{split}: {len(ids):,} tokens, unigram entropy {entropy:.3f} nats, begins")
        print("    " + repr(corpus.tokenizer.decode(ids[:60]).decode("utf-8", "replace")))


if __name__ == "__main__":
    command_line(main)
