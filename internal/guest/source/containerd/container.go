// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	taskapi "github.com/containerd/containerd/api/types/task"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
)

// Labels of nerdctl and of the CRI.
const (
	nerdctlName     = "nerdctl/name"
	nerdctlPorts    = "nerdctl/ports"
	nerdctlNetworks = "nerdctl/networks"
	nerdctlStateDir = "nerdctl/state-dir"
	criPodName      = "io.kubernetes.pod.name"
	criPodNamespace = "io.kubernetes.pod.namespace"
	criContainer    = "io.kubernetes.container.name"
)

// sandboxMetadata is the extension in which the CRI keeps a pod's sandbox, since
// containerd 1.0.
const sandboxMetadata = "io.cri-containerd.sandbox.metadata"

// maxFile bounds the files that are read for one container.
const maxFile = 1 << 20

// portMapping is one entry of nerdctl/ports and of network-config.json, as CNI
// writes it. Field names match in any case.
type portMapping struct {
	HostPort      int64
	ContainerPort int64
	Protocol      string
	HostIP        string
}

// object makes what is declared of one running container. What cannot be read
// is a warning, and no ports.
func (f *fetcher) object(namespace string, c *containersapi.Container, t *taskapi.Process, cni cniResults) engine.Object {
	id := namespace + "/" + c.GetID()
	o := engine.Object{ID: id}
	owner := ownerOf(namespace, c)
	bad := func(what string, err error) {
		o.Warnings = append(o.Warnings, fmt.Sprintf("container %q: %s: %v", owner.Name, what, err))
	}
	cc := engine.Container{ID: id, Owner: owner, Paused: t.GetStatus() != taskapi.Status_RUNNING}
	var ports []engine.Published
	if ext, ok := c.GetExtensions()[sandboxMetadata]; ok {
		pod, err := parseSandbox(ext.GetValue())
		if err != nil {
			bad("sandbox metadata", err)
		}
		ports, cc.Addresses = pod.ports, pod.addresses
	} else if _, ok := c.GetLabels()[nerdctlName]; ok {
		mappings, err := nerdctlMappings(c.GetLabels(), f.files)
		if err != nil {
			bad("ports", err)
		}
		for _, m := range mappings {
			ports = append(ports, engine.Published{
				Protocol: m.Protocol, HostIP: m.HostIP, HostPort: m.HostPort, ContainerPort: m.ContainerPort,
			})
		}
		if cc.Addresses, err = cni.addresses(namespace + "-" + c.GetID()); err != nil {
			bad("addresses", err)
		}
	}
	var warnings []string
	o.Bindings, warnings = engine.Declare(cc, ports)
	o.Warnings = append(o.Warnings, warnings...)
	o.Fact = engine.Fact{Owner: owner, ID: c.GetID(), User: f.user, Addresses: cc.Addresses}
	cgroup, err := cgroupsPath(c.GetSpec().GetValue())
	if err != nil {
		bad("spec", err)
	}
	if path, cg, ok := f.o.Host.Cgroup(int(t.GetPid()), f.user, c.GetID(), cgroup); ok {
		o.Fact.Path, o.Fact.Cgroup = path, cg
	}
	return o
}

// unsure is a container whose task's state is not known: that is what the engine
// answers if the task's shim is silent for two seconds, as on a machine under load.
func (f *fetcher) unsure(namespace string, c *containersapi.Container, t *taskapi.Process, cni cniResults) engine.Object {
	o := f.object(namespace, c, t, cni)
	return engine.Object{ID: o.ID, Unsure: true, Fact: o.Fact}
}

// stopped is a container without a task. nerdctl may have left the NAT rules to its
// addresses. ok is false if it has none.
func (f *fetcher) stopped(namespace string, c *containersapi.Container, cni cniResults) (o engine.Object, ok bool) {
	if _, nerdctl := c.GetLabels()[nerdctlName]; !nerdctl {
		return o, false
	}
	o.ID = namespace + "/" + c.GetID()
	o.Fact = engine.Fact{Owner: ownerOf(namespace, c), ID: c.GetID(), Stopped: true}
	o.Fact.Addresses, _ = cni.addresses(namespace + "-" + c.GetID()) // it is only a name
	return o, len(o.Fact.Addresses) > 0
}

// ownerOf names a container as its user would: by nerdctl's name, or by its pod.
func ownerOf(namespace string, c *containersapi.Container) port.Owner {
	l := c.GetLabels()
	o := port.Owner{
		Kind: port.OwnerContainer, ID: c.GetID(), Namespace: namespace, Name: l[nerdctlName],
		Labels: engine.Labels(l, "nerdctl/", "containerd.io/", "io.cri-containerd", "io.containerd."),
	}
	if pod := l[criPodName]; o.Name == "" && pod != "" {
		o.Name = pod
		if n := l[criContainer]; n != "" {
			o.Name += "/" + n
		}
		if n := l[criPodNamespace]; n != "" {
			o.Namespace = n
		}
	}
	if o.Name == "" {
		o.Name = c.GetID()
		if len(o.Name) == 64 {
			o.Name = o.Name[:12]
		}
	}
	return o
}

// nerdctlMappings returns the published ports of a container of nerdctl: from
// its label, and in newer versions from a file in its state directory. A
// container without either publishes nothing.
func nerdctlMappings(labels map[string]string, files Access) ([]portMapping, error) {
	var networks []string
	if s := labels[nerdctlNetworks]; s != "" {
		if err := json.Unmarshal([]byte(s), &networks); err != nil {
			return nil, fmt.Errorf("label %s: %w", nerdctlNetworks, err)
		}
	}
	for _, n := range networks {
		if n == "host" || n == "none" || strings.HasPrefix(n, "container:") {
			return nil, nil // -p has no meaning there
		}
	}
	if s, ok := labels[nerdctlPorts]; ok && s != "" {
		var m []portMapping
		if err := json.Unmarshal([]byte(s), &m); err != nil {
			return nil, fmt.Errorf("label %s: %w", nerdctlPorts, err)
		}
		return m, nil
	}
	dir := labels[nerdctlStateDir]
	if !filepath.IsAbs(dir) {
		return nil, nil
	}
	path := filepath.Join(dir, "network-config.json")
	b, err := files.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var config struct{ PortMappings []portMapping }
	if err := json.Unmarshal(b, &config); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return config.PortMappings, nil
}

// readFile reads a small regular file.
func readFile(path string) ([]byte, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxFile {
		return nil, fmt.Errorf("%s: want a regular file of at most %d KiB", path, maxFile>>10)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, maxFile))
}

// sandbox is what a pod's sandbox declares.
type sandbox struct {
	ports     []engine.Published
	addresses []netip.Addr
}

// parseSandbox reads the CRI's metadata of a sandbox.
func parseSandbox(b []byte) (sandbox, error) {
	var m struct {
		Metadata struct {
			IP            string
			AdditionalIPs []string
			Config        struct {
				PortMappings []struct {
					Protocol      int    `json:"protocol"` // runtime.v1.Protocol
					ContainerPort int64  `json:"container_port"`
					HostPort      int64  `json:"host_port"`
					HostIP        string `json:"host_ip"`
				} `json:"port_mappings"`
			}
		}
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return sandbox{}, err
	}
	var s sandbox
	for _, ip := range append([]string{m.Metadata.IP}, m.Metadata.AdditionalIPs...) {
		if a, err := netip.ParseAddr(ip); err == nil {
			s.addresses = append(s.addresses, a.Unmap())
		}
	}
	protocols := [...]string{"tcp", "udp", "sctp"}
	for _, p := range m.Metadata.Config.PortMappings {
		if p.HostPort == 0 {
			continue // declared by the pod, not published
		}
		proto := fmt.Sprintf("protocol %d", p.Protocol)
		if p.Protocol >= 0 && p.Protocol < len(protocols) {
			proto = protocols[p.Protocol]
		}
		pub := engine.Published{Protocol: proto, HostIP: p.HostIP, HostPort: p.HostPort, ContainerPort: p.ContainerPort}
		if p.HostIP != "" {
			s.ports = append(s.ports, pub)
			continue
		}
		// A hostPort without an address is open in the families of the pod.
		has := func(is func(netip.Addr) bool) bool { return slices.ContainsFunc(s.addresses, is) }
		if has(netip.Addr.Is4) || !has(netip.Addr.Is6) {
			s.ports = append(s.ports, pub)
		}
		if has(netip.Addr.Is6) {
			pub.HostIP = "::"
			s.ports = append(s.ports, pub)
		}
	}
	return s, nil
}

// cniResults is what CNI gave to whom: one file "network-container-interface" for
// each address.
type cniResults struct {
	byContainer map[string][]netip.Addr
	broken      map[string]error // files that cannot be read, by name
	err         error            // nothing can be read
}

// readCNI reads the results of one container, or of all if it is "".
func readCNI(dir, container string) cniResults {
	r := cniResults{byContainer: make(map[string][]netip.Addr), broken: make(map[string]error)}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		r.err = err
	}
	for _, e := range entries {
		if container != "" && !isResultOf(e.Name(), container) {
			continue
		}
		if err := r.read(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			r.broken[e.Name()] = err
		}
	}
	return r
}

// isResultOf reports whether a file is of a container, or of one whose name contains
// that one's.
func isResultOf(file, container string) bool { return strings.Contains(file, "-"+container+"-") }

func (r cniResults) read(path string) error {
	b, err := readFile(path)
	if err != nil {
		return err
	}
	var result struct {
		ContainerID string
		Result      struct {
			IPs []struct{ Address string }
		}
	}
	if err := json.Unmarshal(b, &result); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, ip := range result.Result.IPs {
		if p, err := netip.ParsePrefix(ip.Address); err == nil {
			r.byContainer[result.ContainerID] = append(r.byContainer[result.ContainerID], p.Addr().Unmap())
		}
	}
	return nil
}

// addresses returns the addresses that CNI gave to a container, in the order of its
// networks' names; none means that it has none from CNI.
func (r cniResults) addresses(container string) ([]netip.Addr, error) {
	for file, err := range r.broken {
		if isResultOf(file, container) {
			return nil, err
		}
	}
	return r.byContainer[container], r.err
}

// cgroupsPath returns the cgroup that the OCI spec asks for, or "".
func cgroupsPath(spec []byte) (string, error) {
	if len(spec) == 0 {
		return "", nil
	}
	var s struct {
		Linux struct{ CgroupsPath string }
	}
	if err := json.Unmarshal(spec, &s); err != nil {
		return "", err
	}
	return s.Linux.CgroupsPath, nil
}
