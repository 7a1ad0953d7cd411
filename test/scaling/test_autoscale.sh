#!/bin/sh
# test_autoscale: `shoal autoscale` over a fake API of Kubernetes, over a command, and over processes of this machine that join
# a NATS server; its /metrics, its configuration file, its YAML for Kubernetes and the figures in docs/SCALING.md. Prints
# "ok NAME", "not ok NAME: why" and "skip NAME: why" lines; SHOAL is the binary.
set -u
cd "$(dirname "$0")/../.." || exit 1
command -v python3 >/dev/null 2>&1 || { echo "skip autoscale: python3 is not installed"; exit 0; }
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
SHOAL=${SHOAL:-build/shoal} TMP_DIR=$tmp python3 - <<'END'
import http.server, json, os, re, shutil, signal, socket, ssl, subprocess, threading, time, urllib.request

SHOAL, TMP, MODEL = os.environ["SHOAL"], os.environ["TMP_DIR"], "test/models/fry-1"
TOKEN = "secret-token-of-the-account"
FAST = ["--interval", "0.2", "--out-cooldown", "0", "--in-cooldown", "0", "--strategy", "queue", "--predictor", "none"]
started = []


def check(name, good, why=""):
    print(f"ok {name}" if good else f"not ok {name}: {str(why)[-600:]}", flush=True)


def start(*args):
    p = subprocess.Popen([SHOAL, "autoscale", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.append(p)
    return p


def run(*args):
    p = start(*args)
    out, err = p.communicate(timeout=120)
    return p.returncode, out, err


def lines(out):
    return [json.loads(x) for x in out.splitlines()]


def until(condition, seconds=90):
    end = time.time() + seconds
    while not condition() and time.time() < end:
        time.sleep(0.05)
    return condition()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Fake:
    """/metrics of a server and the API of Kubernetes, with its own number of replicas."""

    def __init__(self, certificate=None):
        self.replicas, self.waiting, self.patch_status, self.requests = 1, 0, 200, []
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                fake.answer(self, None)

            def do_PATCH(self):
                fake.answer(self, self.rfile.read(int(self.headers["Content-Length"])).decode())

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(f"{certificate}.pem", f"{certificate}.key")
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, h, body):
        status, type = 200, "application/json"
        if h.path == "/metrics":
            type = "text/plain"
            text = (f"process_cpu_seconds_total 1\nshoal_cpus 2\nprocess_resident_memory_bytes 5e8\nshoal_host_memory_bytes 1e9\n"
                    f'shoal_host_memory_available_bytes 5e8\nvllm:num_requests_waiting{{model_name="a b",engine="0"}} {self.waiting}\n')
        else:
            self.requests.append((h.command, h.path, h.headers["Authorization"], h.headers["Content-Type"], body))
            if h.headers["Authorization"] != f"Bearer {TOKEN}":
                status, text = 401, json.dumps({"kind": "Status", "message": "Unauthorized"})
            elif h.path.startswith("/api/v1/namespaces/team/pods?"):
                running = {"status": {"phase": "Running", "podIP": "127.0.0.1"}, "metadata": {}}
                text = json.dumps({"items": [running, {"status": {"phase": "Pending"}}, {"status": {"phase": "Running", "podIP": "x/"}}]})
            elif body and self.patch_status != 200:
                status, text = self.patch_status, json.dumps({"kind": "Status", "message": "the object has been modified"})
            else:
                if body:
                    self.replicas = json.loads(body)["spec"]["replicas"]
                text = json.dumps({"kind": "Scale", "spec": {"replicas": self.replicas}, "status": {"replicas": 1, "selector": "app=shoal,tier in (a)"}})
        h.send_response(status)
        h.send_header("Content-Type", type)
        h.send_header("Content-Length", str(len(text)))
        h.end_headers()
        h.wfile.write(text.encode())


def account(name, ca=None):
    folder = f"{TMP}/{name}"
    os.makedirs(folder, exist_ok=True)
    for file, text in (("token", TOKEN + "\n"), ("namespace", "team")):
        with open(f"{folder}/{file}", "w") as f:
            f.write(text)
    if ca:
        shutil.copy(ca, f"{folder}/ca.crt")
    return folder


def kubernetes(fake, folder, *more):
    return ["--json", "--target", "kubernetes", "--deployment", "shoal", "--kubernetes-api", fake.url, "--service-account", folder, *more]


def test_kubernetes():
    fake, folder = Fake(), account("plain")
    fake.waiting = 50
    p = start(*kubernetes(fake, folder, "--metrics-port", str(fake.port), "--max-nodes", "3", *FAST))
    check("kubernetes: a queue adds replicas", until(lambda: fake.replicas == 3), fake.requests[-3:])
    fake.waiting = 0
    check("kubernetes: an empty queue removes them", until(lambda: fake.replicas == 1), fake.requests[-3:])
    fake.patch_status, fake.waiting = 409, 50
    check("kubernetes: a refused change is tried again", until(lambda: len([r for r in fake.requests if r[4] and '"replicas":2' in r[4]]) >= 3),
          fake.requests[-3:])
    p.send_signal(signal.SIGTERM)
    out, err = p.communicate(timeout=60)
    scale, bearer = "/apis/apps/v1/namespaces/team/deployments/shoal/scale", f"Bearer {TOKEN}"
    check("kubernetes: GET of the scale", ("GET", scale, bearer, None, None) in fake.requests, fake.requests[:3])
    check("kubernetes: PATCH of the scale",
          ("PATCH", scale, bearer, "application/merge-patch+json", '{"spec":{"replicas":2}}') in fake.requests, fake.requests[:5])
    check("kubernetes: GET of the pods", ("GET", "/api/v1/namespaces/team/pods?labelSelector=app%3Dshoal%2Ctier%20in%20%28a%29", bearer, None, None)
          in fake.requests, fake.requests[:5])
    check("kubernetes: nothing else is requested", {r[:2] for r in fake.requests} <= {("GET", scale), ("PATCH", scale)} |
          {r[:2] for r in fake.requests if r[1].startswith("/api/v1/namespaces/team/pods?")}, fake.requests)
    d = lines(out)
    check("decisions have their inputs and reason", any(x["action"] == "out" and x["reason"] == "high" and x["queue"] == 1 and x["score"] == 1 and
          x["memory"] == 0.5 and x["to"] == x["nodes"] + 1 for x in d), out[:600])
    check("a refused change is in the log", any("the object has been modified" in x.get("error", "") and not x["carried_out"] for x in d), out[-600:])
    check("SIGTERM ends the autoscaler", p.returncode == 0 and TOKEN not in out + err, err)

    with open(f"{folder}/token", "w") as f:
        f.write("another")
    code, out, err = run(*kubernetes(fake, folder, *FAST))
    check("kubernetes: a wrong token", code == 1 and "status 401: Unauthorized" in err and "another" not in err, err)
    os.remove(f"{folder}/token")
    code, out, err = run("--target", "kubernetes", "--deployment", "shoal", "--kubernetes-api", "http://192.0.2.1", "--service-account", folder)
    check("kubernetes: no token without TLS", code == 2 and "expected https://" in err, err)
    code, out, err = run("--target", "kubernetes", "--deployment", "../x", "--kubernetes-api", fake.url, "--service-account", folder)
    check("kubernetes: a name that is none", code == 2 and "--deployment NAME" in err, err)


def test_tls():
    if not shutil.which("openssl"):
        print("skip kubernetes over TLS: openssl is not installed")
        return
    for name in "ab":
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=IP:127.0.0.1", "-keyout", f"{TMP}/{name}.key", "-out", f"{TMP}/{name}.pem"], check=True, capture_output=True)
    fake, plain = Fake(f"{TMP}/a"), Fake()
    more = ["--metrics", plain.url + "/metrics", "--evaluations", "1", *FAST]
    plain.waiting = 50
    code, out, err = run(*kubernetes(fake, account("right", f"{TMP}/a.pem"), *more))
    check("kubernetes over TLS", code == 0 and fake.replicas == 2, err)
    before = len(fake.requests)
    code, out, err = run(*kubernetes(fake, account("wrong", f"{TMP}/b.pem"), *more))
    check("kubernetes over TLS: another authority is refused", code == 1 and len(fake.requests) == before and "certificate" in err, err)


def test_command():
    fake, script = Fake(), f"{TMP}/scale.sh"
    with open(script, "w") as f:
        f.write(f'#!/bin/sh\necho "$*" >>{TMP}/calls\n[ "$2" != 4 ]\n')
    os.chmod(script, 0o755)
    fake.waiting = 50
    port = free_port()
    p = start("--json", "--command", f"'{script}' set", "--metrics", fake.url + "/metrics", "http://127.0.0.1:1/metrics", "--min-nodes", "2",
              "--port", str(port), *FAST)

    def calls():
        return open(f"{TMP}/calls").read().split("\n") if os.path.exists(f"{TMP}/calls") else []

    check("a command gets the number of nodes", until(lambda: calls()[:3] == ["set 2", "set 3", "set 4"]), calls())
    check("a command that fails is run again", until(lambda: calls().count("set 4") >= 2), calls())
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as r:
        page = r.read().decode()
    check("metrics of the decisions", "shoal_autoscale_nodes 3\n" in page and "murmurnet_active_nodes 3\n" in page and
          re.search(r'shoal_autoscale_decisions_total{action="out",reason="high"} 1\n', page) and
          'shoal_autoscale_decisions_total{action="failed",reason="high"}' in page and 'shoal_autoscale_load{input="queue"} 1\n' in page and
          'shoal_autoscale_score{kind="measured"} 1\n' in page, "\n".join(x for x in page.split("\n") if "autoscale" in x))
    p.send_signal(signal.SIGINT)
    out, err = p.communicate(timeout=60)
    check("a server that does not answer gets one warning", err.count("'http://127.0.0.1:1/metrics' is not known") == 1, err)
    check("a command's failure is reported", p.returncode == 0 and "failed with status 1" in err, err)
    os.remove(f"{TMP}/calls")
    code, out, err = run("--json", "--no-enable", "--command", f"{script} set", "--metrics", fake.url + "/metrics", "--evaluations", "2", *FAST)
    d = lines(out)
    check("--no-enable only decides", code == 0 and calls() == ["set 1", ""] and [x["to"] for x in d] == [2, 2] and not d[0]["carried_out"], out + err)
    code, out, err = run("--command", f"{TMP}/none", "--metrics", fake.url + "/metrics")
    check("a command that does not exist", code == 1 and "failed with status 127" in err, err)


def commands(parent=None):
    """The words of the nodes that run, by process; of all parents or of one."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
            if parent is None or int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1]) == parent:
                found[int(pid)] = words
        except OSError:
            pass
    return {pid: words for pid, words in found.items() if "node" in words and "--name" in words}


def children(p):
    return commands(p.pid)


def test_local():
    if not shutil.which("nats-server"):
        print("skip local nodes: nats-server is not installed")
        return
    port, fake = free_port(), Fake()
    with open(f"{TMP}/nats.conf", "w") as f:
        f.write(f'listen: 127.0.0.1:{port}\nmax_payload: 8MB\njetstream {{store_dir: "{TMP}/store"}}\n')
    nats = subprocess.Popen(["nats-server", "-c", f"{TMP}/nats.conf"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    started.append(nats)

    def listens():
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return True
        except OSError:
            return False

    until(listens)
    fake.waiting = 50
    p = start("--target", "local", "--model", MODEL, "--join", f"nats://127.0.0.1:{port}", "--node-options=--threads 1 --exact", "--metrics",
              fake.url + "/metrics", "--max-nodes", "3", *FAST)
    check("local: nodes are started", until(lambda: len(children(p)) == 3), children(p))
    words = list(children(p).values())
    if not words:
        return
    check("local: the command of a node", all(w[1] == "node" and w[2] == MODEL and w[w.index("--threads") + 1] == "1" and
          w[w.index("--join") + 1] == f"nats://127.0.0.1:{port}" for w in words) and len({w[w.index("--name") + 1] for w in words}) == 3, words)
    killed = min(children(p))
    os.kill(killed, signal.SIGKILL)
    check("local: a killed node is started again", until(lambda: len(children(p)) == 3 and killed not in children(p)), children(p))
    e = subprocess.Popen([SHOAL, "eval", MODEL, "--tasks", "pick", "--n", "20", "--exact", "--json", "--cluster", f"nats://127.0.0.1:{port}", "--store",
                          f"{TMP}/eval.db"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started.append(e)
    out, err = e.communicate(timeout=200)
    check("local: the nodes compute for a command", e.returncode == 0 and "computed here" not in err, err)
    fake.waiting = 0
    check("local: nodes leave", until(lambda: len(children(p)) == 1), children(p))
    p.send_signal(signal.SIGTERM)
    out, err = p.communicate(timeout=100)
    names = {w[w.index("--name") + 1] for w in words}
    left = [w for w in commands().values() if names & set(w)]
    check("local: no node is left", p.returncode == 0 and not left, left)
    check("local: a removed node has ended by itself", err.count("has ended") >= 2, err)
    nats.kill()
    nats.wait()


SETTINGS = """# the configuration of another program
distributed_coordination:
  enable: true
  consensus_algorithm: "simple_majority"
  load_balance_strategy: "hybrid"
monitoring:
  enable_prometheus: true
  prometheus_port: 8123
  alert_check_interval: 30.0
  notification_channels:
    - type: "webhook"
      url: "http://localhost:8080/alerts"
autoscaling:
  enable: true
  scaling_strategy: "hybrid"
  min_workers: 2
  max_workers: 7
  target_cpu_utilization: 0.65
performance_optimization:
  enable: true
  enable_compression: true
  compression_algorithm: "lz4"
  enable_auto_optimization: true
"""


def test_settings():
    path = f"{TMP}/config.yaml"
    with open(path, "w") as f:
        f.write(SETTINGS)
    code, out, err = run(path, "--print-kubernetes")
    check("a configuration file", code == 0 and '--min-nodes, "2", --max-nodes, "7"' in out and '--target-cpu-utilization, "0.65"' in out, err)
    check("keys without effect get a note", f"{path}:3: distributed_coordination.enable has no effect: commands take '--cluster" in err and
          "alert_check_interval" in err and "prometheus_port" not in err, err)
    code, out, err = run(path, "--print-kubernetes", "--max-nodes", "8")
    check("flags override the file", code == 0 and '--max-nodes, "8"' in out, err)
    fake = Fake()
    p = start(path, "--port", "0", "--command", "true", "--metrics", fake.url + "/metrics", "--evaluations", "1", "--interval", "0.2")
    out, err = p.communicate(timeout=60)
    check("a whole run with the file", p.returncode == 0 and "2 -> 2  hold" in out, out + err)
    for name, old, new, message in (("an unknown key", "min_workers", "min_worker", "did you mean"), ("a wrong port", "8123", "x", "expected a port"),
                                    ("a wrong value", "min_workers: 2", "min_workers: 0", "min_workers"), ("no section", "autoscaling:", "other:", "no section")):
        with open(path, "w") as f:
            f.write(SETTINGS.replace(old, new))
        code, out, err = run(path, "--print-kubernetes")
        check(f"settings: {name}", code == 2 and message in err, f"{code}: {err}")
    for name, args, message in (("no target", ["--metrics", fake.url], "name a target"), ("no load", ["--command", "true"], "--metrics URL"),
                                ("two targets", ["--target", "local", "--command", "true", "--metrics", "x"], "--command is an option of the target command"),
                                ("an option of another target", ["--command", "true", "--metrics", "x", "--join", "y"], "--join is an option of the target local"),
                                ("no model", ["--target", "local", "--metrics", "x"], "--model MODEL"), ("no file", ["abc"], "YAML file"),
                                ("no key", ["--command", "true", "--metrics", "x", "--metrics-key-env", "SHOAL_NO_KEY"], "'SHOAL_NO_KEY'")):
        code, out, err = run(*args)
        check(f"usage: {name}", code == 2 and message in err, f"{code}: {err}")


REQUIRED = {  # kind: (apiVersion, required paths)
    "Deployment": ("apps/v1", ["spec.replicas", "spec.selector.matchLabels.app", "spec.template.metadata.labels.app", "spec.template.spec.containers.0.image"]),
    "Service": ("v1", ["spec.selector.app", "spec.ports.0.port", "spec.ports.0.targetPort"]),
    "ServiceAccount": ("v1", []),
    "Role": ("rbac.authorization.k8s.io/v1", ["rules.0.apiGroups", "rules.0.resources", "rules.0.verbs"]),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", ["subjects.0.namespace", "roleRef.apiGroup", "roleRef.kind", "roleRef.name"]),
    "ServiceMonitor": ("monitoring.coreos.com/v1", ["spec.selector.matchExpressions.0.values", "spec.endpoints.0.port", "spec.endpoints.0.path"]),
    "ScaledObject": ("keda.sh/v1alpha1", ["spec.scaleTargetRef.name", "spec.triggers.0.metadata.query", "spec.triggers.0.metadata.threshold",
                                          "spec.triggers.0.metadata.serverAddress"]),
}


def at(v, path):
    for key in path.split("."):
        v = v[int(key)] if isinstance(v, list) else v.get(key)
    return v


def test_yaml():
    try:
        import yaml
    except ImportError:
        print("skip YAML: python3 has no module yaml")
        return
    code, out, err = run("--print-kubernetes", "--model", "/models/a: b", "--image", "registry/shoal:1", "--namespace", "team", "--max-nodes", "5")
    documents = list(yaml.safe_load_all(out))
    kinds = [d["kind"] for d in documents]
    check("YAML: the kinds", code == 0 and sorted(set(kinds)) == sorted(REQUIRED), kinds)
    for d in documents:
        version, paths = REQUIRED[d["kind"]]
        missing = [p for p in paths if at(d, p) in (None, "", [])]
        check(f"YAML: {d['kind']} {d['metadata']['name']}", d["apiVersion"] == version and d["metadata"]["namespace"] == "team" and not missing, missing)
    by = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    servers, scaler = by["Deployment", "shoal"], by["Deployment", "shoal-autoscale"]
    check("YAML: every text is one value", at(servers, "spec.template.spec.containers.0.args")[1] == "/models/a: b", servers)
    args = at(scaler, "spec.template.spec.containers.0.args")
    check("YAML: arguments are texts", all(isinstance(x, str) for x in args), args)
    code, _, err = run(*args[1:], "--backtest", "/dev/null")
    check("YAML: the autoscaler accepts its arguments", code == 1 and "/dev/null" in err, f"{code}: {err}")
    rules = by["Role", "shoal-autoscale"]["rules"]
    check("YAML: the least rights", rules[0]["verbs"] == ["get", "patch"] and rules[0]["resourceNames"] == ["shoal"] and rules[1]["verbs"] == ["list"], rules)
    selectors = {s["metadata"]["name"]: s["spec"]["selector"]["app"] for s in documents if s["kind"] == "Service"}
    check("YAML: services select the pods", all(by["Deployment", n]["spec"]["template"]["metadata"]["labels"]["app"] == app for n, app in selectors.items()), selectors)
    keda = by["ScaledObject", "shoal"]
    check("YAML: KEDA is paused", keda["metadata"]["annotations"]["autoscaling.keda.sh/paused"] == "true" and keda["spec"]["maxReplicaCount"] == 5, keda)
    if shutil.which("promtool"):
        with open(f"{TMP}/rules.yaml", "w") as f:
            json.dump({"groups": [{"name": "q", "rules": [{"record": "q", "expr": at(keda, "spec.triggers.0.metadata.query")}]}]}, f)
        p = subprocess.run(["promtool", "check", "rules", f"{TMP}/rules.yaml"], capture_output=True, text=True)
        check("YAML: the query of KEDA", p.returncode == 0, p.stdout + p.stderr)
    else:
        print("skip the query of KEDA: promtool is not installed")
    code, _, err = run("--print-kubernetes", "--namespace", "A b")
    check("YAML: a name that is none", code == 2 and "lower-case letters" in err, err)

    compose = yaml.safe_load(open("examples/compose.yaml"))
    services = compose["services"]
    check("compose: services", all(("image" in s or "build" in s) and set(s) <= {"image", "build", "command", "environment", "ports", "configs", "depends_on",
          "healthcheck", "deploy", "stop_grace_period"} for s in services.values()), services)
    check("compose: references", all(x in services for s in services.values() for x in s.get("depends_on", [])) and
          all(c["source"] in compose["configs"] for s in services.values() for c in s.get("configs", [])), compose)


def test_backtest():
    with open(f"{TMP}/load.jsonl", "w") as f:
        subprocess.run(["python3", "test/scaling/load_curve.py", "1"], stdout=f, check=True)
    code, out, err = run("--backtest", f"{TMP}/load.jsonl", "--season", "3600")
    page = open("docs/SCALING.md").read()
    missing = [x for x in out.splitlines() if x.rstrip() not in page]
    check("docs/SCALING.md has the figures of the back-test", code == 0 and len(out.splitlines()) == 5 and not missing, "\n".join(missing) + err)
    code, out, err = run("--backtest", f"{TMP}/load.jsonl", "--season", "3600", "--json")
    d = {x["predictor"]: x for x in lines(out)}
    check("a season is predicted better than by reacting", d["holt_winters"]["better"] and
          d["holt_winters"]["predicting"]["mae"] < d["holt_winters"]["reacting"]["mae"] and
          d["holt_winters"]["predicting"]["under_provisioned"] < d["holt_winters"]["reacting"]["under_provisioned"], out)
    code, out, err = run("--backtest", f"{TMP}/none.jsonl")
    check("a recording that does not exist", code == 1 and "none.jsonl" in err, err)


try:
    for test in (test_kubernetes, test_tls, test_command, test_settings, test_yaml, test_backtest, test_local):
        test()
finally:
    for p in started:
        if p.poll() is None:
            p.kill()
END
