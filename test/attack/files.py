"""files: state that other users could read, pipes and devices as paths, a base that is truncated while the server runs,
and files that a killed server leaves.
"""
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time

from attack import CHAT, COMPLETION, SHOAL, Server, report, skip

KEY = "sk-attack"
ENV = {"SHOAL_API_KEY": KEY}


def modes_below(folder):
    """Entries that another user could read, as "name: mode"."""
    bad = []
    for at, folders, files in os.walk(folder):
        for name in [".", *files]:
            path = os.path.join(at, name)
            mode = stat.S_IMODE(os.lstat(path).st_mode)
            if mode & 0o077 and not os.path.islink(path):
                bad.append(f"{os.path.relpath(path, folder)}: {mode:o}")
    return bad


def wait_until(condition, seconds=60):
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def job_wait(server, id):
    def ended():
        state = json.loads(server.ask(f"/v1/jobs/{id}", key=KEY)[1]).get("state")
        return state not in ("queued", "running", "paused")
    return wait_until(ended)


def exercise(server):
    """Makes every kind of file that a server stores."""
    server.ask(CHAT, {"model": "fry-1", "messages": [{"role": "user", "content": "2+2"}], "max_tokens": 4}, key=KEY)
    server.ask("/v1/ask", {"question": "2+2", "conversation": "c1", "max_tokens": 4}, key=KEY)
    server.ask("/api/blobs/sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", raw=b"hello",
               key=KEY)
    server.ask("/api/create", {"model": "made", "from": "fry-1", "system": "Short."}, key=KEY)
    data = os.path.join(server.folder, "d.jsonl")
    with open(data, "w") as f:
        f.write('{"prompt": "2+2", "completion": "4"}\n')
    status, text, _ = server.ask("/v1/jobs", {"kind": "eval", "args": ["test/models/fry-1"], "options": {
        "task": "fry:add", "limit": 2}}, key=KEY)
    if status in (200, 201, 202):
        job_wait(server, json.loads(text)["id"])
    server.ask("/v1/backups", {}, key=KEY)


def test_modes():
    folder = tempfile.mkdtemp(prefix="attack-files-")
    before = os.umask(0)
    try:
        state = os.path.join(folder, "state")
        # As an older server left it.
        os.makedirs(os.path.join(state, "blobs"))
        with open(os.path.join(state, "blobs", "old"), "w") as f:
            f.write("x")
        with open(os.path.join(state, "notes.txt"), "w") as f:
            f.write("not the server's")
        with Server(folder=folder, env=ENV) as s:
            exercise(s)
            time.sleep(0.3)
            bad = [b for b in modes_below(state) if not b.startswith("notes.txt")]
            report("no file of the state is open to other users, with umask 0", "; ".join(bad))
            found = sorted(os.listdir(state))
            report("the state was exercised", {"serve.db", "jobs.db", "blobs", "models"} <= set(found) or str(found))
            report("a foreign file in the state folder keeps its mode",
                   stat.S_IMODE(os.stat(os.path.join(state, "notes.txt")).st_mode) == 0o666)
            output = open(s.log).read()
            report("entries that were open before are reported", "open to other users" in output or output[-300:])
    finally:
        os.umask(before)
        shutil.rmtree(folder)


def test_shared_folder():
    folder = tempfile.mkdtemp(prefix="attack-files-")
    shared = os.path.join(folder, "shared")
    os.mkdir(shared)
    os.chmod(shared, 0o1777)
    done = subprocess.run([SHOAL, "serve", "test/models/fry-1", "--port", "0", "--state", shared], capture_output=True,
                          text=True, timeout=60)
    report("a folder in which all may write is refused as the state",
           done.returncode == 1 and "is shared with other users" in done.stderr or done.stderr)
    report("and keeps its mode", stat.S_IMODE(os.stat(shared).st_mode) == 0o1777)
    shutil.rmtree(folder)


def test_special_paths():
    with Server(env=ENV) as s:
        pipe = os.path.join(s.folder, "pipe")
        inside = os.path.join(s.folder, "adapter")
        os.mkfifo(pipe)
        os.mkdir(inside)
        os.mkfifo(os.path.join(inside, "adapter_config.json"))
        tensors = os.path.join(s.folder, "tensors")
        os.mkdir(tensors)
        with open(os.path.join(tensors, "adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}, f)
        os.mkfifo(os.path.join(tensors, "adapter_model.safetensors"))
        for path in (pipe, inside, tensors, "/dev/zero", "/dev/stdin", "/dev/tty"):
            name = path.replace(s.folder, "…")
            try:
                status, text, seconds = s.ask("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path}, key=KEY,
                                              timeout=20)
                report(f"'{name}' as an adapter is refused at once", 400 <= status < 500 or f"{status} {text}")
            except OSError as e:
                report(f"'{name}' as an adapter is refused at once", f"no answer: {e}")
        status, _, _ = s.ask(COMPLETION, {"model": "fry-1", "prompt": "2+2=", "max_tokens": 1}, key=KEY)
        report("and the server continues", status == 200)


def copied_base(folder):
    base = os.path.join(folder, "base")
    shutil.copytree("test/models/fry-1", base)
    return base, os.path.join(base, "model.safetensors")


def test_truncated_base():
    folder = tempfile.mkdtemp(prefix="attack-files-")
    base, tensors = copied_base(folder)
    with Server(model=base, folder=folder) as s:
        report("/health is good first", s.ask("/health")[0] == 200)
        size = os.path.getsize(tensors)
        os.truncate(tensors, size // 2)
        try:
            status, text, _ = s.ask("/health")
            refused, why, _ = s.ask(COMPLETION, {"model": "base", "prompt": "2+2=", "max_tokens": 2})
            report("/health of a server with a truncated base is 503 with the reason",
                   (status == 503 and "model.safetensors" in text) or f"{status} {text}")
            report("and so are its answers", (refused == 503 and "model_changed" in why) or f"{refused} {why}")
        except OSError as e:
            s.process.wait(20)
            report("a server with a truncated base names the file", "became shorter" in open(s.log).read() or str(e))
        code = s.stop()
        report("no signal ends a server with a truncated base", code in (0, 1) or f"exit status {code}")
    shutil.rmtree(folder)


def test_truncated_while_running():
    """`run` reads its base; the pages beyond the new end cannot be read."""
    folder = tempfile.mkdtemp(prefix="attack-files-")
    base, tensors = copied_base(folder)
    process = subprocess.Popen([SHOAL, "chat", base, "--store", os.path.join(folder, "calls.db"), "--n", "8"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.stdin.write(b"2+2\n")
        process.stdin.flush()
        process.stdout.readline()
        os.truncate(tensors, 4096)
        _, output = process.communicate(b"3+3\n", timeout=60)
        output = output.decode(errors="replace")
        report("a base that shrinks under 'chat' ends it with a message, or harms nothing",
               process.returncode == 0 or (process.returncode == 1 and "model.safetensors' became shorter" in output)
               or f"{process.returncode}: {output[-300:]}")
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def test_killed_server():
    folder = tempfile.mkdtemp(prefix="attack-files-")
    dead = subprocess.Popen(["true"])
    dead.wait()
    with Server(folder=folder, env=ENV) as s:
        s.ask("/api/create", {"model": "made", "from": "fry-1", "system": "Short."}, key=KEY)
        s.process.kill()
    left = os.path.join(folder, "state", "models", f"made.json.tmp-{dead.pid}-3")
    with open(left, "w") as f:
        f.write("half")
    with Server(folder=folder, env=ENV) as s:
        report("leftovers of a killed server are removed at the next start", not os.path.exists(left))
        status, text, _ = s.ask("/api/tags", key=KEY)
        report("and its completed files exist", "made" in text or text)
    shutil.rmtree(folder)


if os.name != "posix":
    skip("files", "not a POSIX system")
else:
    test_modes()
    test_shared_folder()
    test_special_paths()
    test_truncated_base()
    test_truncated_while_running()
    test_killed_server()
