// SPDX-License-Identifier: Apache-2.0

//go:build linux

package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fairlead/fairlead/test/kit/enclave"
	"github.com/fairlead/fairlead/test/kit/program"
)

// Node is a cluster of one node that runs pods: etcd, an API server, a scheduler, a
// controller manager, containerd, a kubelet and kube-proxy, in an enclave. They run until
// the enclave ends.
type Node struct {
	*Cluster
	daemons []*program.Process // that are not expected to end
}

// pauseImage is the image of a pod's sandbox, here one of busybox.
const pauseImage = "registry.k8s.io/pause:3.10"

// podNetwork is a network of pods whose host ports are NAT rules.
const podNetwork = `{"cniVersion":"0.4.0","name":"pods","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":true,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.244.0.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}`

// containerdConfig: to lower the oom score of what it starts takes CAP_SYS_RESOURCE, which
// not every root has.
const containerdConfig = `version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "` + pauseImage + `"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
`

// kubeletConfig has the cgroup of the enclave for %s. Evictions by disk are off, as a
// machine for tests may be full.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /%s
failCgroupV1: false
failSwapOn: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
podCIDR: 10.244.0.0/24
evictionHard: {nodefs.available: "0%%", imagefs.available: "0%%", memory.available: "10Mi"}
enforceNodeAllocatable: [pods]
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
nodeStatusUpdateFrequency: 5s
syncFrequency: 10s
`

// controllers are those that the tests need.
const controllers = "daemonset-controller,serviceaccount-controller,serviceaccount-token-controller," +
	"root-ca-certificate-publisher-controller,node-lifecycle-controller,node-ipam-controller,endpointslice-controller," +
	"garbage-collector-controller,namespace-controller,pod-garbage-collector-controller"

// StartNode starts a node in the enclave in which this program runs, after SetUp, and
// imports archives of images besides that of busybox. It returns when the node is ready.
func StartNode(ctx context.Context, dir string, images ...string) (_ *Node, err error) {
	made, err := New(dir, nil)
	if err != nil {
		return nil, err
	}
	n := &Node{Cluster: made}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, n.Logs())
		}
	}()
	if err := errors.Join(prepare(), n.configure()); err != nil {
		return nil, err
	}
	if err := n.control(ctx); err != nil {
		return nil, err
	}
	if err := n.load(ctx, images); err != nil {
		return nil, err
	}
	if err := n.start(enclave.Tool("kubelet"), "--config", n.path("kubelet.yaml"), "--kubeconfig", n.Kubeconfig,
		"--hostname-override", "node", "--node-ip", enclave.NodeAddr); err != nil {
		return nil, err
	}
	if err := n.eventually(ctx, func() error {
		_, err := n.Kubectl(ctx, "wait", "--for=condition=Ready", "--timeout=1s", "node/node")
		return err
	}); err != nil {
		return nil, fmt.Errorf("the node is not ready: %w", err)
	}
	proxy, err := n.Proxy(ctx, enclave.NodeAddr, "iptables")
	if err != nil {
		return nil, err
	}
	return n, n.start(proxy[0], proxy[1:]...)
}

// control starts what the kubelet needs: the control plane and containerd.
func (n *Node) control(ctx context.Context) error {
	etcd := n.Etcd()
	if err := errors.Join(n.start(etcd[0], etcd[1:]...), n.start("containerd")); err != nil {
		return err
	}
	if err := n.eventually(ctx, func() error { return n.EtcdAnswers(ctx) }); err != nil {
		return err
	}
	api := n.apiServer(enclave.NodeAddr, "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP")
	if err := n.start(api[0], api[1:]...); err != nil {
		return err
	}
	if err := n.eventually(ctx, func() error { return n.Answers(ctx) }); err != nil {
		return err
	}
	if err := n.eventually(ctx, func() error { return exec.CommandContext(ctx, "ctr", "version").Run() }); err != nil {
		return fmt.Errorf("containerd does not answer: %w", err)
	}
	return errors.Join(
		n.start(enclave.Tool("kube-controller-manager"), "--kubeconfig", n.Kubeconfig,
			"--service-account-private-key-file", n.path("sa.key"), "--root-ca-file", n.path("certs/apiserver.crt"),
			"--use-service-account-credentials=false", "--leader-elect=false", "--controllers="+controllers),
		n.start(enclave.Tool("kube-scheduler"), "--kubeconfig", n.Kubeconfig, "--leader-elect=false"))
}

// load imports archives of images, and that of busybox, which is the sandbox's as well.
func (n *Node) load(ctx context.Context, archives []string) error {
	busybox, err := enclave.ImageArchive(n.Dir)
	if err != nil {
		return err
	}
	for _, archive := range append(archives, busybox) {
		if err := ctr(ctx, "import", archive); err != nil {
			return err
		}
	}
	return ctr(ctx, "tag", "docker.io/library/"+enclave.Image+":latest", pauseImage)
}

// ctr runs a command on the images that a kubelet sees.
func ctr(ctx context.Context, args ...string) error {
	if out, err := exec.CommandContext(ctx, "ctr", append([]string{"-n", "k8s.io", "images"}, args...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("ctr images %q: %w: %s", args, err, out)
	}
	return nil
}

// configure writes the configurations of containerd, its network and the kubelet.
func (n *Node) configure() error {
	return errors.Join(
		os.MkdirAll("/etc/containerd", 0o755), os.MkdirAll("/etc/cni/net.d", 0o755),
		os.WriteFile("/etc/containerd/config.toml", []byte(containerdConfig), 0o600),
		os.WriteFile("/etc/cni/net.d/10-pods.conflist", []byte(podNetwork), 0o600),
		os.WriteFile(n.path("kubelet.yaml"), fmt.Appendf(nil, kubeletConfig, enclave.CgroupParent()), 0o600))
}

// prepare mounts what a kubelet needs besides the file systems of an enclave, and makes its
// cgroups.
func prepare() error {
	for _, dir := range []string{"/var/lib/kubelet", "/var/log"} {
		if err := errors.Join(os.MkdirAll(dir, 0o755), syscall.Mount("tmpfs", dir, "tmpfs", 0, "")); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	if err := errors.Join(os.MkdirAll("/var/log/pods", 0o755), os.MkdirAll("/var/log/containers", 0o755)); err != nil {
		return err
	}
	// Mounts of a volume reach the pods that have it.
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share the mounts: %w", err)
	}
	return errors.Join(pinSysctls(), makeCgroups())
}

// pinSysctls covers the settings of the whole machine that a kubelet changes by files that
// already have its values.
func pinSysctls() error {
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		file := filepath.Join("/run/sysctl", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(value+"\n"), 0o600)); err != nil {
			return err
		}
		if err := syscall.Mount(file, "/proc/sys/"+name, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("cover sysctl %s: %w", name, err)
		}
	}
	return nil
}

// makeCgroups makes the cgroup of the enclave in each hierarchy; enclave.Run removes them.
func makeCgroups() error {
	const root = "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/cgroup.controllers"); err == nil { // cgroup v2 alone
		return os.MkdirAll(filepath.Join(root, enclave.CgroupParent()), 0o755)
	}
	hierarchies, err := filepath.Glob(root + "/*/cgroup.procs")
	if err != nil {
		return err
	}
	for _, procs := range hierarchies {
		dir := filepath.Join(filepath.Dir(procs), enclave.CgroupParent())
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} { // empty in a new one
			b, err := os.ReadFile(filepath.Join(filepath.Dir(procs), name))
			if errors.Is(err, os.ErrNotExist) {
				continue
			}
			if err := errors.Join(err, os.WriteFile(filepath.Join(dir, name), b, 0o600)); err != nil {
				return err
			}
		}
	}
	return nil
}

// start runs a daemon with its output in a file.
func (n *Node) start(name string, args ...string) error {
	d, err := program.Launch(program.Command{Cmd: exec.Command(name, args...), Log: n.path(filepath.Base(name) + ".log")})
	if err == nil {
		n.daemons = append(n.daemons, d)
	}
	return err
}

// eventually calls try until it returns nil, ctx ends, or a daemon has ended.
func (n *Node) eventually(ctx context.Context, try func() error) error {
	for {
		err := try()
		if err == nil {
			return nil
		}
		for _, d := range n.daemons {
			if d.Ended() {
				return fmt.Errorf("%s ended: %w", d.Name(), err)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Logs returns the end of the log of each daemon.
func (n *Node) Logs() string {
	var text []byte
	for _, d := range n.daemons {
		log := d.Output()
		text = fmt.Appendf(text, "end of the log of %s:\n%s\n", d.Name(), log[max(0, len(log)-3000):])
	}
	return string(text)
}

// Kubectl runs kubectl as the administrator and returns its standard output.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.kubectl(exec.CommandContext(ctx, enclave.Tool("kubectl"), args...))
}

func (c *Cluster) kubectl(cmd *exec.Cmd) (string, error) {
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig)
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("kubectl %q: %w: %s", cmd.Args[1:], err, exit.Stderr)
	}
	return string(out), err
}
