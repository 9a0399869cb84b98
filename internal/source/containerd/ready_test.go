// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/source/engine"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
)

// The source waits for the sockets that are configured, and takes no other for
// them. The incumbent waits for the default one, whatever is configured.
func TestOnlyConfiguredSocketIsUsed(t *testing.T) {
	decoy := newFake(t)
	decoy.nerdctl("default/decoy", "decoy", `[{"HostPort":1,"ContainerPort":80,"Protocol":"tcp"}]`)
	e := newFake(t)
	e.nerdctl("default/web", "web", ports80)
	e.stop() // not there yet
	f := enginetest.Run(t, source(t, e, Options{Retry: engine.Retry{MaxDelay: time.Minute}}))
	enginetest.WantKeys(t, f)
	e.start()
	enginetest.WantKeys(t, f, keys80...)
	e.stop()
	enginetest.WantStale(t, f, e.socket)
	enginetest.WantKeys(t, f, keys80...)
}

// Of several that are configured the first that answers is taken.
func TestFirstAnsweringSocketIsUsed(t *testing.T) {
	e := newFake(t)
	e.nerdctl("default/web", "web", ports80)
	f := enginetest.Run(t, source(t, e, Options{Sockets: []string{filepath.Join(t.TempDir(), "none.sock"), e.socket}}))
	enginetest.WantKeys(t, f, keys80...)
}
