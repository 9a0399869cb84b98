// SPDX-License-Identifier: Apache-2.0

//go:build linux

package run

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/fairlead/fairlead/internal/config/yamltree"
	"github.com/fairlead/fairlead/internal/guest/run/policy"
)

// DefaultFile is the configuration that is read if no other is named.
const DefaultFile = "/etc/fairlead/run.yaml"

// Config is the configuration of the service.
type Config struct {
	Socket         string        `key:"socket" is:"path" help:"path of the socket for clients"`
	Control        string        `key:"control" is:"path" help:"path of the agent's control socket"`
	Jobs           int           `key:"jobs" min:"1" max:"1024" help:"maximum of programs that run at the same time"`
	ClientJobs     int           `key:"clientJobs" min:"1" max:"1024" help:"maximum of programs that run at the same time for one container or user"`
	ClientRequests int           `key:"clientRequests" min:"1" max:"1024" help:"maximum of requests of one container or user in a second"`
	Allow          policy.Policy `key:"allow" list:"entries (\"- name: backup\")" help:"programs that may be run; nothing else is run"`

	text []byte // of which it was read
}

// Check returns what no single field shows to be wrong.
func (c *Config) Check() (key string, err error) { return "allow", c.Allow.Check() }

// Same reports whether two configurations are equal in all but what may be run.
func (c Config) Same(other Config) bool {
	return c.Socket == other.Socket && c.Control == other.Control && c.Jobs == other.Jobs &&
		c.ClientJobs == other.ClientJobs && c.ClientRequests == other.ClientRequests
}

// Load reads the configuration. The error joins all mistakes, with their positions.
func Load(path string) (Config, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("read configuration: %w", err)
	}
	return parse(path, data)
}

func parse(path string, data []byte) (Config, error) {
	c := Config{Socket: DefaultSocket, Control: "/run/fairlead/control.sock", Jobs: 16, ClientJobs: 8, ClientRequests: 10, text: data}
	root, err := yamltree.Parse(path, data)
	if err == nil && !root.IsNull() {
		err = (&yamltree.Decoder{Checks: policy.Checks()}).Decode(root, &c)
	}
	return c, err
}

// watchInterval is the time between two looks at the configuration.
const watchInterval = 3 * time.Second

// Watch calls changed with each configuration of a file that differs from the last one, which
// is was at first, or with why it cannot be read, until ctx ends. It looks at once, and calls
// changed, when it is told to. Unless told it takes no empty file, which is more likely half written.
func Watch(ctx context.Context, path string, was Config, now <-chan os.Signal, changed func(Config, error)) {
	last, failed := was.text, error(nil)
	tick := time.NewTicker(watchInterval)
	defer tick.Stop()
	for {
		told := false
		select {
		case <-ctx.Done():
			return
		case <-now:
			told = true
		case <-tick.C:
		}
		data, err := os.ReadFile(path)
		switch {
		case err != nil && (told || failed == nil):
			changed(Config{}, fmt.Errorf("read configuration: %w", err))
		case err == nil && !told && failed == nil && bytes.Equal(data, last):
		case err == nil && !told && len(bytes.TrimSpace(data)) == 0:
			changed(Config{}, fmt.Errorf("%s: empty: if that is meant, confirm it with SIGHUP", path))
		case err == nil:
			changed(parse(path, data))
		}
		last, failed = data, err
	}
}
