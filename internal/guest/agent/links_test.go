// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"testing"

	"github.com/fairlead/fairlead/internal/config"
	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/testkit/wait"
)

// A refusal before the last session says nothing about why no host is connected now.
func TestRefusalIsForgottenWithTheNextSession(t *testing.T) {
	path := filepath.Join(t.TempDir(), "link", "s")
	o := link.Options{Role: link.RoleAgent, Identity: "a", Logger: slog.New(slog.DiscardHandler)}
	l := &links{
		endpoints: []config.Endpoint{{Network: "unix", Path: path}}, options: o,
		tokenFile: func(config.Endpoint) string { return "" }, sessions: make(chan link.Session),
	}
	if err := l.open(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
	defer func() { _ = c.Close() }()
	wait.Until(t, "the refusal is known", func() error {
		if r := l.lastRefused(); r == nil || r.Code != "magic" {
			return errors.New("it is not")
		}
		return nil
	})
	o.Role, o.Identity = link.RoleHost, "h"
	d, err := link.NewDialer(link.Endpoint{Network: "unix", Path: path}, o)
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	agent, err := l.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = agent.Close() }()
	if r := l.lastRefused(); r != nil {
		t.Errorf("still %+v", r)
	}
}
