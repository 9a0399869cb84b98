// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/program"
)

// limit is how long is waited for what is certain to come: pods take their time.
func limit() time.Duration { return 6 * wait.Limit() }

func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	wait.Within(t, limit(), what, try)
}

func tryKubectl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit())
	defer cancel()
	return node.Kubectl(ctx, args...)
}

func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := tryKubectl(args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, diagnosis())
	}
	return out
}

// diagnosis is what the cluster says about fairlead's pods.
func diagnosis() string {
	var text strings.Builder
	for _, args := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"-n", "fairlead", "get", "events", "--sort-by=.lastTimestamp"},
		{"-n", "fairlead", "logs", "--tail=40", "--prefix", "-l", "app.kubernetes.io/name=fairlead"},
	} {
		out, err := tryKubectl(args...)
		fmt.Fprintf(&text, "%q: %v\n%s\n", args, err, out)
	}
	return text.String()
}

// overlay writes a kustomization of one in deploy, with the image and patches of the
// DaemonSet, and returns its directory.
func overlay(t *testing.T, base, tag string, patches ...string) string {
	t.Helper()
	dir := t.TempDir()
	to, err := filepath.Abs(filepath.Join("../../deploy", base))
	if err != nil {
		t.Fatal(err)
	}
	rel, err := filepath.Rel(dir, to)
	if err != nil {
		t.Fatal(err)
	}
	k := map[string]any{
		"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": []string{rel},
		"images": []map[string]string{{"name": "fairlead.invalid/fairlead", "newTag": tag}},
	}
	var list []map[string]any
	for _, p := range patches {
		list = append(list, map[string]any{"target": map[string]string{"kind": "DaemonSet"}, "patch": p})
	}
	k["patches"] = list
	write(t, filepath.Join(dir, "kustomization.yaml"), k)
	return dir
}

// write writes a file of JSON, which is YAML.
func write(t *testing.T, path string, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// deploy applies a kustomization. The service account of a new namespace may come after
// its pods, which are tried again.
func deploy(t *testing.T, dir string) {
	t.Helper()
	eventually(t, "apply", func() error { _, err := tryKubectl("apply", "-k", dir); return err })
}

// rolledOut waits until the pod of the DaemonSet is as it was deployed, and ready.
func rolledOut(t *testing.T) {
	t.Helper()
	kubectl(t, "-n", "fairlead", "rollout", "status", "daemonset/fairlead", "--timeout="+limit().String())
}

// Keys of the scene.
const (
	hostPort    = "tcp 0.0.0.0:8081"
	hostNetwork = "tcp 0.0.0.0:8082"
	nodePort    = "tcp 0.0.0.0:30080"
	plain       = "tcp 0.0.0.0:8083"
)

// owners are those of the scene, as `fairlead ls` names them.
func owners() map[string]string {
	return map[string]string{
		hostPort: "container shop/web", hostNetwork: "container shop/hostnet/app",
		nodePort: "service shop/np", plain: "process busybox",
	}
}

// scene is a pod with a host port, one in the node's network, and a Service with a node
// port.
const scene = `
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: app, image: bb, imagePullPolicy: Never, command: [httpd, -f, -p, "8080", -h, /etc], ports: [{containerPort: 8080, hostPort: 8081}]}
---
apiVersion: v1
kind: Pod
metadata: {name: hostnet, namespace: shop}
spec:
  hostNetwork: true
  terminationGracePeriodSeconds: 0
  containers:
  - {name: app, image: bb, imagePullPolicy: Never, command: [httpd, -f, -p, "0.0.0.0:8082", -h, /etc]}
---
apiVersion: v1
kind: Pod
metadata: {name: backend, namespace: shop, labels: {app: backend}}
spec:
  terminationGracePeriodSeconds: 0
  containers:
  - {name: app, image: bb, imagePullPolicy: Never, command: [httpd, -f, -p, "8080", -h, /etc]}
---
apiVersion: v1
kind: Service
metadata: {name: np, namespace: shop}
spec:
  type: NodePort
  selector: {app: backend}
  ports: [{port: 80, targetPort: 8080, nodePort: 30080}]
`

// setScene makes the scene, and a process of another user on the node, until the test ends.
func setScene(t *testing.T) (end func()) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "scene.yaml")
	if err := os.WriteFile(file, []byte(scene), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := tryKubectl("get", "namespace", "shop"); err != nil {
		kubectl(t, "create", "namespace", "shop")
	}
	eventually(t, "make the scene", func() error { _, err := tryKubectl("apply", "-f", file); return err })
	server := exec.Command("busybox", "httpd", "-f", "-p", "0.0.0.0:8083", "-h", "/")
	server.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end = func() {
		if ended {
			return
		}
		ended = true
		_ = server.Process.Kill()
		_ = server.Wait()
		kubectl(t, "delete", "--wait=false", "-f", file)
	}
	t.Cleanup(end)
	kubectl(t, "-n", "shop", "wait", "--for=condition=Ready", "pod", "--all", "--timeout="+limit().String())
	return end
}

// listed returns the ports of the scene that `fairlead ls` on the node shows, with their
// owners.
func listed(flags ...string) (map[string]string, error) {
	l, err := list(flags...)
	if err != nil {
		return nil, err
	}
	wanted, rows := owners(), make(map[string]string)
	for _, p := range l.Publications {
		if _, ok := wanted[p.Key.String()]; ok && p.State.String() == "active" {
			rows[p.Key.String()] = ownerOf(p.Owner)
		}
	}
	return rows, nil
}

// list is what `fairlead ls` on the node prints.
func list(flags ...string) (l status.List, err error) {
	cmd := exec.Command(os.Getenv(program.Variable), append([]string{"ls", "-o", "json"}, flags...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+node.Kubeconfig)
	out, err := cmd.Output()
	if err != nil {
		return l, fmt.Errorf("ls: %w: %s", err, out)
	}
	return l, json.Unmarshal(out, &l)
}

// ownerOf is "KIND NAMESPACE/NAME", or "-".
func ownerOf(o port.Owner) string {
	switch {
	case o.Name == "":
		return "-"
	case o.Namespace == "":
		return o.Kind.String() + " " + o.Name
	}
	return o.Kind.String() + " " + o.Namespace + "/" + o.Name
}

// shows waits until `fairlead ls` shows these ports of the scene with these owners.
func shows(t *testing.T, want map[string]string, flags ...string) {
	t.Helper()
	eventually(t, "fairlead ls", func() error {
		rows, err := listed(flags...)
		if err == nil && !maps.Equal(rows, want) {
			err = fmt.Errorf("%v, want %v", rows, want)
		}
		return err
	})
}

// examined returns what `fairlead doctor` says in the agent's pod, by area and name.
func examined() (map[string]doctor.Check, error) {
	out, err := tryKubectl("-n", "fairlead", "exec", "daemonset/fairlead", "--", "/fairlead", "doctor", "-o", "json")
	if out == "" { // it fails if a check does
		return nil, errors.Join(err, errors.New("doctor prints nothing"))
	}
	var r doctor.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return nil, err
	}
	checks := make(map[string]doctor.Check)
	for _, c := range r.Checks {
		if old, ok := checks[c.Area+" "+c.Name]; !ok || old.State == doctor.OK {
			checks[c.Area+" "+c.Name] = c
		}
	}
	return checks, nil
}
