// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/guest/source/kube"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/status/doctor"
	"github.com/fairlead/fairlead/internal/status/inventory"
	"github.com/fairlead/fairlead/test/kit/cluster"
)

const crdFile = "../../deploy/kubernetes/crd.yaml"

// inventoried is an API server with a Node that is this machine, and who asks it.
type inventoried struct {
	*kubernetes
	agents string // the kubeconfig of agents, who have no more rights than they need
}

func startInventoried(t *testing.T) *inventoried {
	t.Helper()
	c := &inventoried{kubernetes: startCluster(t), agents: filepath.Join(t.TempDir(), "agents")}
	boot, _, err := inventory.ThisMachine()
	if err != nil {
		t.Fatal(err)
	}
	c.writeKubeconfig(c.agents, "nobody")
	c.do(func(ctx context.Context) error { return c.CreateNode(ctx, "n", boot) })
	return c
}

func (c *inventoried) do(f func(ctx context.Context) error) {
	c.t.Helper()
	if err := patient(func() error { return f(context.Background()) }); err != nil {
		c.t.Fatal(err)
	}
}

func (c *inventoried) allow(verbs ...string) {
	c.t.Helper()
	c.do(func(ctx context.Context) error { return c.AllowInventory(ctx, "nobody", verbs...) })
}

// agent starts an agent that writes the inventory.
func (c *inventoried) agent(t *testing.T, flags ...string) *peers {
	t.Helper()
	return startPeers(t, append(flags, "--source", "socket", "--kubeconfig", c.agents,
		"--cluster-inventory", "--cluster-node-name", "n", "--cluster-interval", "1s")...)
}

// object reads the object of the node.
func (c *inventoried) object() (o inventory.NodeInventory, err error) {
	b, err := c.Do(context.Background(), "GET", cluster.Inventories+"/n", nil)
	if err != nil {
		return o, err
	}
	return o, json.Unmarshal(b, &o)
}

// written returns what the agent's doctor knows of its inventory.
func written(p *peers) (doctor.Inventory, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := status.NewClient(p.control).Examine(ctx)
	if err != nil {
		return doctor.Inventory{}, err
	}
	if a.Inventory == nil {
		return doctor.Inventory{}, errors.New("the agent writes no inventory")
	}
	return *a.Inventory, nil
}

// fails waits until the agent cannot write for a reason; none if it can.
func fails(t *testing.T, p *peers, reason string) {
	t.Helper()
	eventually(t, func() error {
		i, err := written(p)
		switch {
		case err != nil:
			return err
		case reason == "" && i.Error == "" && !i.Written.IsZero(), reason != "" && strings.Contains(i.Error, reason):
			return nil
		}
		return fmt.Errorf("inventory %+v, want error %q", i, reason)
	})
}

// list is what `fairlead ls --cluster -o json` prints.
func (c *inventoried) list(flags ...string) (status.List, error) {
	out, err := try(binary(), append([]string{"ls", "--cluster", "--kubeconfig", c.Kubeconfig, "-o", "json"}, flags...)...)
	if err != nil {
		return status.List{}, err
	}
	var l status.List
	return l, json.Unmarshal([]byte(out), &l)
}

// listed waits until a port of the machine is in the list of the cluster, or is not.
func (c *inventoried) listed(t *testing.T, at net.Addr, want bool) {
	t.Helper()
	addr := at.(*net.TCPAddr).AddrPort()
	eventually(t, func() error {
		l, err := c.list("--node", "n")
		if err != nil {
			return err
		}
		i := slices.IndexFunc(l.Publications, func(p status.Publication) bool { return p.Key.AddrPort() == addr })
		switch {
		case i >= 0 != want:
			return fmt.Errorf("%v is listed: %v, want %v", addr, i >= 0, want)
		case !want:
			return nil
		}
		if p := l.Publications[i]; p.Node != "n" || p.Owner.Kind != port.OwnerProcess || p.Owner.Name == "" {
			return fmt.Errorf("listed as %+v", p)
		}
		return nil
	})
}

// listen opens a port that others can reach.
func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp4", nodeAddr+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// The agent with no more rights than it needs, through all that can be missing.
func TestInventory(t *testing.T) {
	c := startInventoried(t)
	before := listen(t)
	c.allow("get", "create", "update")
	policy := filepath.Join(t.TempDir(), "policy.yaml")
	p := c.agent(t, "--cluster-policy", policy)
	fails(t, p, "no such resource as nodeinventories.fairlead.dev")
	c.do(func(ctx context.Context) error { return c.CreateCRD(ctx, crdFile) })
	fails(t, p, "")
	c.listed(t, before.Addr(), true)

	o, err := c.object()
	if err != nil {
		t.Fatal(err)
	}
	if r := o.OwnerReferences; len(r) != 1 || r[0].Kind != "Node" || r[0].UID == "" {
		t.Errorf("owner references %+v", r)
	}
	if o.Status.Ports.Wide == 0 || len(o.Status.Wide) == 0 || len(o.Status.Conditions) != 3 {
		t.Errorf("structured fields %+v", o.Status)
	}

	after := listen(t)
	c.listed(t, after.Addr(), true)
	_ = after.Close()
	c.listed(t, after.Addr(), false)

	t.Run("a policy", func(t *testing.T) { c.judged(t, p, policy) })
	t.Run("a verb is missing", func(t *testing.T) {
		c.allow("get", "create")
		listen(t)
		fails(t, p, "verb update of nodeinventories.fairlead.dev is missing")
		c.allow("get", "create", "update")
		fails(t, p, "")
	})
	t.Run("the API server is killed", func(t *testing.T) {
		c.api.Stop(syscall.SIGKILL)
		l := listen(t)
		p.active("tcp " + l.Addr().String()) // published all the same
		fails(t, p, "connect")
		c.api.run(t)
		c.ready()
		c.listed(t, l.Addr(), true)
	})
	t.Run("two agents", func(t *testing.T) {
		second := c.agent(t)
		fails(t, second, inventory.ErrHeld.Error())
		p.agent.Stop(syscall.SIGTERM)
		eventually(t, func() error { // it has nothing new to write but what has changed
			i, err := written(second)
			if err == nil && i.Error != "" {
				err = errors.New(i.Error)
			}
			return err
		})
		c.listed(t, listen(t).Addr(), true)
	})
}

// judged checks what an agent makes of its policy as that changes.
func (c *inventoried) judged(t *testing.T, p *peers, file string) {
	at := listen(t).Addr().(*net.TCPAddr)
	is := func(want doctor.Policy, condition string) {
		t.Helper()
		eventually(t, func() error {
			i, err := written(p)
			if err != nil {
				return err
			}
			o, err := c.object()
			if err != nil {
				return err
			}
			got := ""
			for _, c := range o.Status.Conditions {
				if c.Type == inventory.ConditionCompliant {
					got = c.Reason
				}
			}
			if i.Policy == nil || i.Policy.Judged != want.Judged || i.Policy.Violations != want.Violations || !strings.Contains(i.Policy.Says, want.Says) || got != condition {
				return fmt.Errorf("policy %+v, condition %q, want %+v, %q", i.Policy, got, want, condition)
			}
			return nil
		})
	}
	is(doctor.Policy{Says: "no such file"}, "NotJudged")
	deny := fmt.Sprintf("rules: [{match: {ports: %d}, action: deny}, {match: {protocol: tcp}, action: allow}, {match: {protocol: udp}, action: allow}]", at.Port)
	for _, step := range []struct {
		text, condition string
		want            doctor.Policy
	}{
		{deny, "Violations", doctor.Policy{Judged: true, Violations: 1, Says: at.AddrPort().String()}},
		{"rules: {}", "NotJudged", doctor.Policy{Violations: 1, Says: "cannot be judged"}},
		{"policies: [{nodes: {labels: {role: x}}, rules: [{match: {protocol: tcp}, action: deny}]}]\n" + strings.Replace(deny, "deny", "allow", 1), "NoViolations", doctor.Policy{Judged: true}},
	} {
		if err := os.WriteFile(file, []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		is(step.want, step.condition)
		if step.want.Judged {
			_, err := try(binary(), "ls", "--cluster", "--violations", "--kubeconfig", c.Kubeconfig, "-f", file)
			if (err == nil) != (step.want.Violations == 0) {
				t.Errorf("audit by %s: %v", step.text, err)
			}
		}
	}
}

// The object belongs to the Node that has its name now, also if the next agent finds its
// content as it should be.
func TestInventoryOfANodeMadeAgain(t *testing.T) {
	c := startInventoried(t)
	c.allow("get", "create", "update")
	c.do(func(ctx context.Context) error { return c.CreateCRD(ctx, crdFile) })
	ports := []inventory.Port{{
		Key: port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: 22}, State: port.Active, Since: time.Now().UTC().Truncate(time.Second),
	}}
	owner := func(not types.UID) (uid types.UID) {
		t.Helper()
		eventually(t, func() error {
			o, err := c.object()
			if err != nil {
				return err
			}
			if r := o.OwnerReferences; len(r) != 1 || r[0].UID == not {
				return fmt.Errorf("owners %+v, want another than %q", r, not)
			}
			uid = o.OwnerReferences[0].UID
			return nil
		})
		return uid
	}
	var first types.UID
	t.Run("first", func(t *testing.T) { // which ends its writer
		c.writer(t, func(*rest.Config) {}, ports)
		first = owner("")
	})
	c.do(func(ctx context.Context) error {
		_, err := c.Do(ctx, "DELETE", "/api/v1/nodes/n", nil)
		return err
	})
	boot, _, err := inventory.ThisMachine()
	if err != nil {
		t.Fatal(err)
	}
	c.do(func(ctx context.Context) error { return c.CreateNode(ctx, "n", boot) })
	c.writer(t, func(*rest.Config) {}, ports)
	owner(first)
}

// writer runs a writer for the node until the test ends, with the rights of agents unless
// change says otherwise.
func (c *inventoried) writer(t *testing.T, change func(*rest.Config), ports []inventory.Port) *inventory.Writer {
	t.Helper()
	boot, namespace, err := inventory.ThisMachine()
	if err != nil {
		t.Fatal(err)
	}
	access, err := kube.New(kube.Options{Kubeconfigs: []string{c.agents}, Logger: logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	w := inventory.NewWriter(inventory.Options{
		Node: "n", Interval: time.Second, Machine: boot, Namespace: namespace, Logger: slog.New(slog.DiscardHandler),
		Lock: func(context.Context, string) (func(), error) { return func() {}, nil },
		Config: func() (*rest.Config, string, error) {
			conf, origin, err := access.Access()
			if err == nil {
				change(conf)
			}
			return conf, origin, err
		},
		Report: func(context.Context) inventory.Report {
			return inventory.Report{Agent: "test", Ports: slices.Clone(ports)}
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = w.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return w
}

// An agent whose token names another node cannot write the object of this one.
func TestInventoryOfAnotherNode(t *testing.T) {
	c := startInventoried(t)
	const agent = "system:serviceaccount:fairlead:fairlead"
	c.do(func(ctx context.Context) error { return c.CreateCRD(ctx, crdFile) })
	c.do(func(ctx context.Context) error {
		return c.CreateAdmission(ctx, "../../deploy/kubernetes/admission.yaml")
	})
	c.do(func(ctx context.Context) error {
		return c.AllowInventory(ctx, agent, "get", "create", "update")
	})
	as := func(conf *rest.Config, node string) {
		conf.BearerToken = "token" // who may impersonate
		conf.Impersonate = rest.ImpersonationConfig{UserName: agent, Extra: map[string][]string{"authentication.kubernetes.io/node-name": {node}}}
	}
	conf := &rest.Config{Host: cluster.URL, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	as(conf, "other")
	other, err := rest.HTTPClientFor(conf)
	if err != nil {
		t.Fatal(err)
	}
	defer other.CloseIdleConnections()
	eventually(t, func() error { // the policy applies a moment after it was created
		resp, err := other.Post(cluster.URL+cluster.Inventories+"?dryRun=All", "application/json",
			strings.NewReader(`{"apiVersion": "fairlead.dev/v1alpha1", "kind": "NodeInventory", "metadata": {"name": "n"}}`))
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		if err == nil && !strings.Contains(string(b), "its own node only") {
			err = fmt.Errorf("%s: %s", resp.Status, b)
		}
		return err
	})
	own := c.writer(t, func(conf *rest.Config) { as(conf, "n") }, nil)
	eventually(t, func() error {
		if s := own.State(); !s.Current {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// The real server takes the largest object that an agent writes, and changes are written
// together.
func TestInventoryOfManyPorts(t *testing.T) {
	c := startInventoried(t)
	c.allow("get", "create", "update")
	c.do(func(ctx context.Context) error { return c.CreateCRD(ctx, crdFile) })
	r := rand.New(rand.NewPCG(1, 2))
	var ports []inventory.Port
	for i := range 20_000 {
		name := fmt.Sprintf("%016x%016x%016x", r.Uint64(), r.Uint64(), r.Uint64())
		ports = append(ports, inventory.Port{
			Key:   port.Key{Protocol: port.TCP, Address: netip.IPv4Unspecified(), Port: uint16(i)},
			State: port.Active, Owner: inventory.Owner{Kind: port.OwnerContainer, Name: name, Namespace: "default"}, Since: time.Now().UTC(),
		})
	}
	w := c.writer(t, func(*rest.Config) {}, ports)
	eventually(t, func() error {
		if s := w.State(); s.Writes != 1 || s.Omitted == 0 || s.Error != "" {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	l, err := c.list()
	if err != nil || len(l.Publications) == 0 || len(l.Sources) != 1 || len(l.Sources[0].Warnings) != 1 {
		t.Errorf("%d listed, sources %+v, %v", len(l.Publications), l.Sources, err)
	}
	t.Logf("%d of %d ports are listed", len(l.Publications), len(ports))
}
