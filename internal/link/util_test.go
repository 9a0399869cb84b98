// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/testkit/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

// secret is a token of which no log and no error may show a part.
const secret = "correct-horse-battery-staple-0123456789"

func token(t testing.TB, text string) Token {
	t.Helper()
	tok, err := NewToken(text)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// opts are options with a token.
func opts(t testing.TB, r Role) Options {
	t.Helper()
	return Options{
		Role: r, Identity: "id-" + string(r), Name: "name-" + string(r), Version: "1.2.3",
		Token: token(t, secret), Logger: slog.New(slog.DiscardHandler),
		HandshakeTimeout: time.Minute, // a busy machine may take long
	}
}

func ctx10(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func closed(t testing.TB, c io.Closer) {
	t.Helper()
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			t.Errorf("close: %v", err)
		}
	})
}

type result struct {
	s   Session
	err error
}

// shake runs both ends of a handshake over a pair of connections.
func shake(t testing.TB, dial, accept Options, a, b net.Conn) (dialled, accepted result) {
	t.Helper()
	c := make(chan result, 1)
	go func() {
		s, err := Server(ctx10(t), b, accept)
		c <- result{s, err}
	}()
	s, err := Client(ctx10(t), a, dial)
	dialled, accepted = result{s, err}, <-c
	for _, r := range []result{dialled, accepted} {
		if r.s != nil {
			closed(t, r.s)
		}
	}
	return dialled, accepted
}

// sockets are the two ends of a unix connection.
func sockets(t testing.TB) (a, b net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if a, err = net.Dial("unix", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if b, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	return a, b
}

// sessions are the two ends of a link over a unix connection.
func sessions(t testing.TB, edit ...func(agent, host *Options)) (agent, host Session) {
	t.Helper()
	ao, ho := opts(t, RoleAgent), opts(t, RoleHost)
	for _, f := range edit {
		f(&ao, &ho)
	}
	a, b := sockets(t)
	h, g := shake(t, ho, ao, a, b)
	if h.err != nil || g.err != nil {
		t.Fatal(h.err, g.err)
	}
	return g.s, h.s
}

// connected are the two ends of a link whose host dials: each flow has a
// connection of its own.
func connected(t testing.TB, edit ...func(agent, host *Options)) (agent, host Session, l *Listener) {
	t.Helper()
	ao, ho := opts(t, RoleAgent), opts(t, RoleHost)
	for _, f := range edit {
		f(&ao, &ho)
	}
	e := Endpoint{Network: NetworkUnix, Path: filepath.Join(t.TempDir(), "d", "s")}
	l = listen(t, e, ao)
	l.start()
	host, err := Dial(ctx10(t), e, ho)
	if err != nil {
		t.Fatal(err)
	}
	closed(t, host)
	if agent, err = l.Accept(ctx10(t)); err != nil {
		t.Fatal(err)
	}
	closed(t, agent)
	return agent, host, l
}

// eachKind runs a test with flows that are streams of their session, and with
// such that have a connection of their own.
func eachKind(t *testing.T, f func(t *testing.T, agent, host Session)) {
	t.Run("stream", func(t *testing.T) {
		agent, host := sessions(t)
		f(t, agent, host)
	})
	t.Run("connection", func(t *testing.T) {
		agent, host, _ := connected(t)
		f(t, agent, host)
	})
}

// flow opens a flow from host to agent.
func flow(t testing.TB, agent, host Session) (atAgent, atHost Stream) {
	t.Helper()
	atHost, err := host.Connect(ctx10(t))
	if err != nil {
		t.Fatal(err)
	}
	if c, ok := atHost.(*flowConn); ok { // otherwise sent with the first write
		if _, err := c.conn.Write(c.opening); err != nil {
			t.Fatal(err)
		}
		c.opening = nil
	}
	if atAgent, err = agent.Accept(ctx10(t)); err != nil {
		t.Fatal(err)
	}
	return atAgent, atHost
}

// refusal returns err as a *RefusedError, which must not show the token.
func refusal(t testing.TB, err error) *RefusedError {
	t.Helper()
	var r *RefusedError
	if !errors.As(err, &r) {
		t.Fatalf("got %v, want a RefusedError", err)
	}
	if strings.Contains(err.Error(), secret[:8]) {
		t.Errorf("error shows the token: %v", err)
	}
	return r
}

// Dial makes one session.
func Dial(ctx context.Context, e Endpoint, o Options) (Session, error) {
	d, err := NewDialer(e, o)
	if err != nil {
		return nil, err
	}
	return d.Dial(ctx)
}
