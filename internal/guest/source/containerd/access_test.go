// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/guest/source/engine"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

// guarded reads no file but one.
type guarded struct {
	engine.Path

	file string
}

func (g guarded) ReadFile(path string) ([]byte, error) {
	if path != g.file {
		return nil, fmt.Errorf("%s is not the user's", path)
	}
	return []byte(`{"portMappings":` + ports80 + `}`), nil
}

// Of an engine that is not trusted files are read only by its access, and CNI's results are not.
func TestFilesOfAnUntrustedEngine(t *testing.T) {
	e, dir := newFake(t), t.TempDir()
	for name, text := range map[string]string{
		"network-config.json": `{"portMappings":[{"HostPort":1,"ContainerPort":1,"Protocol":"tcp"}]}`,
		"net-default-x-eth0":  `{"containerId":"default-x","result":{"ips":[{"address":"10.4.0.2/24"}]}}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e.put("default/x", map[string]string{nerdctlName: "web", nerdctlStateDir: "/home/user/web"})
	e.put("default/y", map[string]string{nerdctlName: "other", nerdctlStateDir: dir})
	s := source(t, e, Options{CNIResults: dir, Access: guarded{engine.Path(e.socket), "/home/user/web/network-config.json"}})
	f := enginetest.Run(t, s)
	enginetest.WantKeys(t, f, keys80...)
	f.Lock()
	defer f.Unlock()
	if w := fmt.Sprint(f.Warnings); !strings.Contains(w, "is not the user's") {
		t.Errorf("warnings %s", w)
	}
	for _, b := range f.Set {
		if at := fmt.Sprint(b.Dial); strings.Contains(at, "10.4.0.2") {
			t.Errorf("dialled at %s", at)
		}
	}
}

// What an engine may answer is bounded.
func TestBoundsOfAnEngine(t *testing.T) {
	for _, c := range []struct {
		name, want string
		o          Options
	}{
		{"containers", "more than 3 containers", Options{MaxObjects: 3}},
		{"namespaces", "4 namespaces: at most 3", Options{MaxObjects: 3}},
		{"message", "larger than max", Options{MaxMessage: 1 << 10}},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := newFake(t)
			for i := range 4 {
				id := fmt.Sprintf("default/%d", i)
				if c.name == "namespaces" {
					id = fmt.Sprintf("%d/x", i)
				}
				e.put(id, map[string]string{nerdctlName: strings.Repeat("x", 1<<10)})
			}
			f := enginetest.Run(t, source(t, e, c.o))
			enginetest.Eventually(t, func() error {
				f.Lock()
				defer f.Unlock()
				if f.Err == nil || !strings.Contains(f.Err.Error(), c.want) {
					return fmt.Errorf("stale %v, want %q", f.Err, c.want)
				}
				return nil
			})
		})
	}
}
