// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

// fleet is the sources of several kubeconfigs, which run.
type fleet struct {
	t       *testing.T
	sources map[string]*Source
	feeds   map[string]*enginetest.Feed
}

func runAll(t *testing.T, o Options, paths ...string) *fleet {
	t.Helper()
	o.Kubeconfigs, o.Logger = paths, slog.New(slog.DiscardHandler)
	o.Retry.MinDelay, o.Retry.MaxDelay = 5*time.Millisecond, 20*time.Millisecond
	all, err := NewAll(o, func(string) engine.Memory { return "" })
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t, make(map[string]*Source), make(map[string]*enginetest.Feed)}
	for _, s := range all {
		f.sources[s.Name()], f.feeds[s.Name()] = s, enginetest.Run(t, s)
	}
	return f
}

// want waits until a source reports exactly these ports, with owners in that cluster.
func (f *fleet) want(source, cluster string, keys ...string) {
	f.t.Helper()
	feed := f.feeds[source]
	if feed == nil {
		f.t.Fatalf("no source %q", source)
	}
	enginetest.WantKeys(f.t, feed, keys...)
	enginetest.Eventually(f.t, func() error {
		for _, k := range keys {
			if got := feed.Find(k).Owner.Cluster; got != cluster {
				return fmt.Errorf("%s: %s is of cluster %q, want %q", source, k, got, cluster)
			}
		}
		return nil
	})
}

// quiet fails unless a source has reported a complete set, and nothing to show.
func (f *fleet) quiet(sources ...string) {
	f.t.Helper()
	for _, name := range sources {
		feed := f.feeds[name]
		enginetest.WantKeys(f.t, feed)
		feed.Lock()
		if feed.MethodName != "" || feed.Err != nil || len(feed.Warnings) > 0 {
			f.t.Errorf("%s shows %q, stale %v, warnings %q; want nothing", name, feed.MethodName, feed.Err, feed.Warnings)
		}
		feed.Unlock()
	}
}

func beside(e *fake, name string) string { return filepath.Join(filepath.Dir(e.kubeconfig), name) }

func serves(e *fake, services ...string) *fake {
	for i, name := range services {
		e.put(svc(name, corev1.ServiceTypeNodePort, tcp(80, int32(30080+i))))
		e.put(slice(name, fmt.Sprint("10.1.0.", i+2)))
	}
	return e
}

// All clusters are followed at once, each once, and their owners say in which they are. One
// that is down neither stales nor withdraws what the others report.
func TestAllClustersAreFollowed(t *testing.T) {
	e, other := serves(newFake(t), "web"), serves(newFake(t), "web")
	first, same, second := beside(e, "first.yaml"), beside(e, "same.yaml"), beside(e, "second.yaml")
	e.write(first, "")
	e.write(same, "")
	other.write(second, "")
	f := runAll(t, Options{Retry: engine.Retry{Grace: time.Hour}}, first, same, second, beside(e, "none.yaml"))
	f.want("kube", "first", "tcp 0.0.0.0:30080")
	f.want("kube:second", "second", "tcp 0.0.0.0:30080")
	f.quiet("kube:first", "kube:same", "kube:none")

	d := port.Demand{Slot: port.Slot{Protocol: port.TCP, Port: 80}, Service: true, Scope: "default", Name: "web"}
	var found []engine.Found
	for s, cluster := range map[string]string{"kube": "first", "kube:second": "second"} {
		enginetest.Eventually(t, func() error {
			if o, ok := f.sources[s].Facts().ByAddress(netip.MustParseAddr("10.1.0.2")); !ok || o.Cluster != cluster {
				return fmt.Errorf("%s: the pod is %+v, %v", s, o, ok)
			}
			return nil
		})
		for _, one := range f.sources[s].Find(d) {
			found = engine.AppendFound(found, one)
		}
	}
	if len(found) != 2 || found[0].Owner.Cluster == found[1].Owner.Cluster {
		t.Errorf("svc/default/web is %+v, want two Services", found)
	}

	other.stop()
	enginetest.WantStale(t, f.feeds["kube:second"], "connection refused")
	e.watched()
	e.put(svc("more", corev1.ServiceTypeNodePort, tcp(80, 30081)))
	f.want("kube", "first", "tcp 0.0.0.0:30080", "tcp 0.0.0.0:30081")
	f.want("kube:second", "second", "tcp 0.0.0.0:30080")
	main := f.feeds["kube"]
	main.Lock()
	if main.Err != nil || main.Replaced != 1 {
		t.Errorf("the first cluster: stale %v after %d sets, want one set", main.Err, main.Replaced)
	}
	main.Unlock()
	other.start()
	enginetest.Eventually(t, func() error {
		s := f.feeds["kube:second"]
		s.Lock()
		defer s.Unlock()
		return s.Err
	})
}

// A cluster that does not answer holds up no other one.
func TestClusterThatHangsDelaysNoOther(t *testing.T) {
	slow, e := newFake(t), serves(newFake(t), "web")
	slow.hang["list services"] = true
	f := runAll(t, Options{}, slow.kubeconfig, e.kubeconfig)
	f.want("kube:"+e.kubeconfig, "", "tcp 0.0.0.0:30080")
}

// While there is one cluster nothing says which: not the source, wherever the kubeconfig is,
// and not the owners. Those of the first one do when a second appears, and no longer when its
// ports have gone.
func TestSecondClusterComesAndGoes(t *testing.T) {
	e, other := serves(newFake(t), "web"), serves(newFake(t), "db")
	first, second := beside(e, "first.yaml"), beside(e, "second.yaml")
	e.write(second, "")
	f := runAll(t, Options{Retry: engine.Retry{Grace: 50 * time.Millisecond}}, first, second)
	f.want("kube", "", "tcp 0.0.0.0:30080")
	f.quiet("kube:first", "kube:second")
	other.write(first, "")
	f.want("kube:first", "first", "tcp 0.0.0.0:30080")
	f.want("kube", "second", "tcp 0.0.0.0:30080")
	f.quiet("kube:second")
	if err := os.Remove(first); err != nil {
		t.Fatal(err)
	}
	other.stop()
	f.want("kube:first", "")
	f.want("kube", "", "tcp 0.0.0.0:30080")
	enginetest.WantNoneRemoved(t, f.feeds["kube"])
}

// A kubeconfig that is rotated leads to its new cluster, also where another source has the one
// it named before.
func TestRotatedKubeconfigOfSecondCluster(t *testing.T) {
	e, other, third := serves(newFake(t), "web"), serves(newFake(t), "a", "b"), serves(newFake(t), "a", "b", "c")
	first, second := beside(e, "first.yaml"), beside(e, "second.yaml")
	e.write(first, "")
	e.write(second, "")
	f := runAll(t, Options{}, first, second)
	f.want("kube", "", "tcp 0.0.0.0:30080")
	f.quiet("kube:first", "kube:second")
	other.write(second, "")
	f.want("kube:second", "second", "tcp 0.0.0.0:30080", "tcp 0.0.0.0:30081")
	third.write(second, "")
	f.want("kube:second", "second", "tcp 0.0.0.0:30080", "tcp 0.0.0.0:30081", "tcp 0.0.0.0:30082")
	f.want("kube", "first", "tcp 0.0.0.0:30080")
	enginetest.WantNoneRemoved(t, f.feeds["kube"])
}

// A kubeconfig of a second cluster that may not be used is named, and nothing waits for it.
// One that is broken is stale alone.
func TestUnusableSecondKubeconfig(t *testing.T) {
	e := serves(newFake(t), "web")
	refused, broken := beside(e, "refused.yaml"), beside(e, "broken.yaml")
	e.write(refused, "")
	if err := errors.Join(os.Chmod(refused, 0o666), os.WriteFile(broken, []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	f := runAll(t, Options{}, refused, e.kubeconfig, broken)
	f.want("kube", "", "tcp 0.0.0.0:30080")
	enginetest.WantStale(t, f.feeds["kube:broken"], "kubeconfig "+broken)
	enginetest.Eventually(t, func() error {
		s := f.feeds["kube:refused"]
		s.Lock()
		defer s.Unlock()
		if s.Lack != port.LackSettings || !strings.HasPrefix(s.MethodName, "no usable kubeconfig") || !strings.Contains(s.MethodName, "chmod go-w "+refused) || s.Err != nil {
			return fmt.Errorf("shows %q, stale %v", s.MethodName, s.Err)
		}
		return nil
	})
}

// With a context, kubeconfigs without it count for nothing.
func TestContextChoosesKubeconfigs(t *testing.T) {
	e := serves(newFake(t), "web")
	lacks := beside(e, "lacks.yaml")
	e.write(lacks, "")
	b, err := os.ReadFile(lacks)
	if err == nil {
		err = os.WriteFile(lacks, []byte(strings.ReplaceAll(string(b), "name: x", "name: z")), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	f := runAll(t, Options{Context: "x"}, lacks, e.kubeconfig)
	f.want("kube", "", "tcp 0.0.0.0:30080")
	f.quiet("kube:lacks", "kube:kubeconfig")
	_, err = source(t, e, Options{Kubeconfigs: []string{lacks}, Context: "x"}).load()
	if err == nil || errors.Is(err, engine.ErrAbsent) || !strings.Contains(err.Error(), `context "x"`) {
		t.Errorf("alone: %v, want an error that names the context", err)
	}
}

func TestNamesOfClusters(t *testing.T) {
	got := namesOf(append(Kubeconfigs(), "/a/dev.yaml", "/b/dev.conf", "/c/.yaml", "/d/prod"))
	for path, want := range map[string]string{
		"/etc/rancher/k3s/k3s.yaml": "k3s", "/etc/kubernetes/admin.conf": "kubeadm", "/etc/rancher/rke2/rke2.yaml": "rke2",
		"/var/lib/k0s/pki/admin.conf": "k0s", "/a/dev.yaml": "/a/dev.yaml", "/b/dev.conf": "/b/dev.conf", "/c/.yaml": "/c/.yaml", "/d/prod": "prod",
	} {
		if got[path] != want {
			t.Errorf("%s is called %q, want %q", path, got[path], want)
		}
	}
}

// Only one kubeconfig, or the service account, is one source.
func TestOneKubeconfigIsOneSource(t *testing.T) {
	for name, o := range map[string]Options{
		"one":             {Kubeconfigs: []string{"/a"}},
		"the same twice":  {Kubeconfigs: []string{"/a", "/a", "/x/../a"}},
		"service account": {Getenv: func(k string) string { return map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1"}[k] }},
	} {
		o.Logger = slog.New(slog.DiscardHandler)
		all, err := NewAll(o, func(string) engine.Memory { return "" })
		if err != nil || len(all) != 1 || all[0].Name() != "kube" || all[0].Optional() {
			t.Errorf("%s: %v, %v; want the source kube alone", name, all, err)
		}
	}
}
