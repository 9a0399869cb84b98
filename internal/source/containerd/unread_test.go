// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

// One engine is followed; another one that listens is warned of, and nothing else.
func TestSecondEngineIsWarnedOf(t *testing.T) {
	first, second := newFake(t), newFake(t)
	second.nerdctl("default/x", "web", ports80)
	link := filepath.Join(t.TempDir(), "link.sock")
	if err := os.Symlink(first.socket, link); err != nil {
		t.Fatal(err)
	}
	f := enginetest.Run(t, source(t, nil, Options{
		Sockets: []string{first.socket, link, filepath.Join(t.TempDir(), "none.sock"), enginetest.Leftover(t), second.socket},
	}))
	enginetest.WantWarning(t, f, second.socket)
	f.Lock()
	defer f.Unlock()
	if len(f.Warnings) != 1 || len(f.Set) > 0 {
		t.Errorf("warnings %q, set %v; want one warning", f.Warnings, f.Set)
	}
}
