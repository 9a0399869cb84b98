// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package cluster

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/test/kit/enclave"
)

// The pod of the release's image names the owner of each kind of port on its node as soon
// as the port is there, and drops ports that have gone.
func TestPortsOfTheNodeHaveOwners(t *testing.T) {
	deploy(t, overlay(t, "kubernetes", version))
	rolledOut(t)
	end := setScene(t)
	shows(t, owners())
	shows(t, owners(), "--cluster", "--node", "node")
	t.Logf("\n%s", kubectl(t, "get", "nodeinventories"))
	checks, err := examined()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		t.Logf("%s %s: %s: %s", c.Area, c.Name, c.State, c.Detail)
	}
	for _, name := range []string{"agent processes", "agent engine"} {
		if c, ok := checks[name]; ok {
			t.Errorf("doctor: %+v", c)
		}
	}
	for _, name := range []string{"privileges capabilities", "source kube", "source containerd", "source nat", "source socket", "cluster inventory"} {
		if c := checks[name]; c.State != doctor.OK {
			t.Errorf("doctor: %s: %+v", name, c)
		}
	}
	// A pod has no /dev/vsock, and this containerd's seccomp profile allows the socket.
	if fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err == nil {
		_ = unix.Close(fd)
		if c := checks["kernel vsock"]; c.State != doctor.OK {
			t.Errorf("doctor: %+v", c)
		}
	}
	end()
	shows(t, nil)
	shows(t, nil, "--cluster")
}

// patch changes the pod of the DaemonSet.
func patch(spec string) string {
	return "apiVersion: apps/v1\nkind: DaemonSet\nmetadata: {name: fairlead}\nspec: {template: {spec: " + spec + "}}\n"
}

// unmount takes a mount from the agent.
func unmount(path string) string {
	return patch("{containers: [{name: agent, volumeMounts: [{mountPath: " + path + ", $patch: delete}]}]}")
}

// left is one thing that the pod lacks, and what that must cost.
type left struct {
	out   string // as the table of docs/kubernetes.md calls it
	patch string
	// The ports of the scene that lose their owner, or are missing if the owner is "".
	lost map[string]string
	// The check of doctor that must not be OK, by area and name.
	check string
	// The pod does not get ready, and an event says this.
	unready string
}

// lefts has a row for each mount, capability and share of the node.
func lefts(t *testing.T) []left {
	all := []left{
		{out: "hostNetwork", patch: patch("{hostNetwork: false}"), unready: "Readiness probe failed"},
		{out: "hostPID", patch: patch("{hostPID: false}"), lost: map[string]string{plain: "-"}, check: "agent processes"},
		{out: "/etc/fairlead", patch: unmount("/etc/fairlead"), unready: "Readiness probe failed"},
		{out: "/run/fairlead", patch: unmount("/run/fairlead"), unready: "Back-off restarting failed container"},
		{out: "/sys/fs/cgroup", patch: unmount("/sys/fs/cgroup"), check: "observer udp-bind"},
		{out: "/run/containerd", patch: unmount("/run/containerd"), lost: map[string]string{hostPort: "-", hostNetwork: "process httpd"}, check: "agent engine"},
	}
	for _, c := range []left{
		{out: "BPF", check: "observer tcp-listen"},
		{out: "PERFMON", check: "observer tcp-listen"},
		{out: "NET_ADMIN", check: "privileges capabilities"},
		{out: "SYS_PTRACE", lost: map[string]string{plain: "-"}, check: "privileges capabilities"},
		{out: "DAC_READ_SEARCH", lost: map[string]string{plain: "-"}, check: "privileges capabilities"},
	} {
		rest := slices.DeleteFunc(capabilities(t), func(name string) bool { return name == c.out })
		c.patch = fmt.Sprintf(`[{"op": "replace", "path": "/spec/template/spec/containers/0/securityContext/capabilities/add", "value": ["%s"]}]`,
			strings.Join(rest, `", "`))
		all = append(all, c)
	}
	return all
}

// podSpec is what the manifest says of the pod.
type podSpec struct {
	HostNetwork, HostPID bool
	Containers           []struct {
		SecurityContext struct {
			Capabilities struct{ Add []string }
		}
		VolumeMounts []struct{ MountPath string }
	}
}

func manifest(t *testing.T) podSpec {
	t.Helper()
	b, err := os.ReadFile("../../deploy/kubernetes/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Spec struct {
			Template struct{ Spec podSpec }
		}
	}
	if err := yaml.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	return d.Spec.Template.Spec
}

func capabilities(t *testing.T) []string {
	return manifest(t).Containers[0].SecurityContext.Capabilities.Add
}

// Everything that the pod has of its node is needed: each test leaves one thing out, and
// sees what docs/kubernetes.md says is lost.
func TestWhatIsLostWithoutEach(t *testing.T) {
	setScene(t)
	b, err := os.ReadFile("../../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	var has, tried []string
	pod := manifest(t)
	if pod.HostNetwork {
		has = append(has, "hostNetwork")
	}
	if pod.HostPID {
		has = append(has, "hostPID")
	}
	for _, m := range pod.Containers[0].VolumeMounts {
		has = append(has, m.MountPath)
	}
	has = append(has, capabilities(t)...)
	for _, l := range lefts(t) {
		tried = append(tried, l.out)
		if !strings.Contains(string(b), "\n| `"+l.out+"` ") {
			t.Errorf("docs/kubernetes.md has no row for %s", l.out)
		}
	}
	slices.Sort(has)
	slices.Sort(tried)
	if !slices.Equal(has, tried) {
		t.Errorf("the pod has %q, and what is left out is %q", has, tried)
	}
	for _, l := range lefts(t) {
		t.Run(strings.TrimPrefix(strings.ReplaceAll(l.out, "/", "-"), "-"), func(t *testing.T) { l.test(t) })
	}
	deploy(t, overlay(t, "kubernetes", version))
	rolledOut(t)
	shows(t, owners())
}

func (l left) test(t *testing.T) {
	// Neither the events of an older pod count nor what its agent saved.
	kubectl(t, "-n", "fairlead", "delete", "daemonset", "fairlead", "--ignore-not-found")
	kubectl(t, "-n", "fairlead", "wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=fairlead", "--timeout="+limit().String())
	if err := os.RemoveAll("/run/fairlead"); err != nil {
		t.Fatal(err)
	}
	deploy(t, overlay(t, "kubernetes", version, l.patch))
	if l.unready != "" {
		eventually(t, "an event of the pod", func() error {
			out, err := tryKubectl("-n", "fairlead", "get", "events", "-o", "jsonpath={.items[*].message}",
				"--field-selector", "involvedObject.name="+newestPod())
			if err == nil && !strings.Contains(out, l.unready) {
				err = fmt.Errorf("no %q in %q", l.unready, out)
			}
			return err
		})
		return
	}
	rolledOut(t)
	want := owners()
	for key, owner := range l.lost {
		want[key] = owner
	}
	maps.DeleteFunc(want, func(_, owner string) bool { return owner == "" })
	shows(t, want)
	eventually(t, "doctor", func() error {
		checks, err := examined()
		if c := checks[l.check]; err == nil && (c.State == "" || c.State == doctor.OK) {
			err = fmt.Errorf("%s: %+v", l.check, c)
		}
		return err
	})
}

// newestPod is the name of the pod that was made last.
func newestPod() string {
	out, err := tryKubectl("-n", "fairlead", "get", "pods", "--sort-by=.metadata.creationTimestamp", "-o", "jsonpath={.items[-1:].metadata.name}")
	if err != nil {
		return "unknown"
	}
	return out
}

// What was taken from the agent of a node writes the inventory of that node only.
func TestTokenWritesItsOwnNodeOnly(t *testing.T) {
	deploy(t, overlay(t, "kubernetes", version))
	rolledOut(t)
	create := func(name string) error {
		file := filepath.Join(t.TempDir(), "inventory.json")
		write(t, file, map[string]any{"apiVersion": "fairlead.dev/v1alpha1", "kind": "NodeInventory", "metadata": map[string]string{"name": name}})
		token, err := tryKubectl("-n", "fairlead", "create", "token", "fairlead", "--bound-object-kind=Pod", "--bound-object-name="+newestPod())
		if err == nil {
			_, err = tryKubectl("create", "--dry-run=server", "--validate=false", "-f", file, "--token="+strings.TrimSpace(token))
		}
		return err
	}
	const denied = "its own node only"
	eventually(t, "a refusal of another node's inventory", func() error {
		if err := create("another"); err == nil || !strings.Contains(err.Error(), denied) {
			return fmt.Errorf("want %q, got %w", denied, err)
		}
		return nil
	})
	if err := create("node"); err != nil && strings.Contains(err.Error(), denied) { // it exists, which is another error
		t.Error(err)
	}
}

// An upgrade and its rollback replace the agent: the ports are listed as before, and no
// connection to a pod is reset.
func TestUpgradeAndRollback(t *testing.T) {
	deploy(t, overlay(t, "kubernetes", version))
	rolledOut(t)
	setScene(t)
	shows(t, owners())
	conn := dialled(t, 8081)
	if _, err := io.WriteString(conn, "GET /"); err != nil { // the server waits for more
		t.Fatal(err)
	}
	for _, step := range []struct {
		want string
		do   func()
	}{
		{newVersion, func() { deploy(t, overlay(t, "kubernetes", newVersion)) }},
		{version, func() { kubectl(t, "-n", "fairlead", "rollout", "undo", "daemonset/fairlead") }},
	} {
		step.do()
		rolledOut(t)
		if out := kubectl(t, "-n", "fairlead", "exec", "daemonset/fairlead", "--", "/fairlead", "version"); !strings.Contains(out, step.want) {
			t.Errorf("version %q, want %s", out, step.want)
		}
		shows(t, owners())
	}
	_ = conn.SetDeadline(time.Now().Add(limit()))
	if _, err := io.WriteString(conn, "hostname HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.") {
		t.Errorf("the connection from before the upgrade: %q, %v", line, err)
	}
}

// dialled connects to a port of the node, whose rules may be there before its server listens.
func dialled(t *testing.T, port int) (conn net.Conn) {
	t.Helper()
	eventually(t, "a connection to the node", func() (err error) {
		conn, err = net.DialTimeout("tcp", fmt.Sprintf("%s:%d", enclave.NodeAddr, port), 10*time.Second)
		return err
	})
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// podMonitor is the definition of the Prometheus operator's kind, without its schema.
const podMonitor = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
"metadata":{"name":"podmonitors.monitoring.coreos.com","annotations":{"api-approved.kubernetes.io":"unapproved"}},
"spec":{"group":"monitoring.coreos.com","scope":"Namespaced","names":{"kind":"PodMonitor","plural":"podmonitors"},
"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`

// The API server takes the manifests, and with the monitoring overlay the metrics are
// served at the node's address.
func TestMonitoring(t *testing.T) {
	file := filepath.Join(t.TempDir(), "crd.json")
	if err := os.WriteFile(file, []byte(podMonitor), 0o600); err != nil {
		t.Fatal(err)
	}
	kubectl(t, "apply", "-f", file)
	kubectl(t, "wait", "--for=condition=Established", "--timeout="+limit().String(), "-f", file)
	dir := overlay(t, "kubernetes-monitoring", version)
	eventually(t, "a dry run", func() error { _, err := tryKubectl("apply", "--dry-run=server", "-k", dir); return err })
	deploy(t, dir)
	rolledOut(t)
	for _, c := range []struct{ name, file string }{
		{"fairlead-alerts", "../../deploy/prometheus/fairlead.rules.yaml"}, {"fairlead-dashboard", "../../deploy/grafana/fairlead.json"},
	} {
		var m struct{ Data map[string]string }
		if err := json.Unmarshal([]byte(kubectl(t, "-n", "fairlead", "get", "configmap", c.name, "-o", "json")), &m); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(c.file)
		if err != nil {
			t.Fatal(err)
		}
		if m.Data[filepath.Base(c.file)] != string(b) {
			t.Errorf("ConfigMap %s is not %s", c.name, c.file)
		}
	}
	conn := dialled(t, 9464)
	if _, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(conn)
	if err != nil || !strings.Contains(string(b), "fairlead_build_info{") {
		t.Errorf("metrics: %v: %.300s", err, b)
	}
	// The alert about a missing host is not about agents without one.
	if strings.Contains(string(b), "fairlead_link_connected") {
		t.Error("an agent that only lists ports has metrics of a link")
	}
}

// The pod needs the level privileged of PodSecurity: the API server refuses it at the next
// one, and takes it in the namespace of the manifests.
func TestPodSecurity(t *testing.T) {
	deploy(t, overlay(t, "kubernetes", version))
	rolledOut(t)
	if _, err := tryKubectl("get", "namespace", "strict"); err != nil {
		kubectl(t, "create", "namespace", "strict")
	}
	kubectl(t, "label", "--overwrite", "namespace", "strict", "pod-security.kubernetes.io/enforce=baseline")
	var d struct {
		Spec struct {
			Template struct{ Spec map[string]any }
		}
	}
	if err := json.Unmarshal([]byte(kubectl(t, "-n", "fairlead", "get", "daemonset", "fairlead", "-o", "json")), &d); err != nil {
		t.Fatal(err)
	}
	for namespace, ok := range map[string]bool{"fairlead": true, "strict": false} {
		spec := maps.Clone(d.Spec.Template.Spec)
		if namespace == "strict" {
			spec["serviceAccountName"], spec["serviceAccount"] = "default", "default"
		}
		file := filepath.Join(t.TempDir(), "pod.json")
		write(t, file, map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]string{"name": "p", "namespace": namespace}, "spec": spec})
		eventually(t, "a dry run in "+namespace, func() error {
			_, err := tryKubectl("apply", "--dry-run=server", "-f", file)
			if ok {
				return err
			}
			if err == nil || !strings.Contains(err.Error(), `violates PodSecurity "baseline`) {
				return fmt.Errorf("want a violation, got %w", err)
			}
			return nil
		})
	}
}
