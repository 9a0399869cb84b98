// SPDX-License-Identifier: Apache-2.0

package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fairlead/fairlead/internal/link/wire"
	"github.com/fairlead/fairlead/internal/port"
)

func TestHandshake(t *testing.T) {
	for name, roles := range map[string][2]Role{
		"host dials": {RoleHost, RoleAgent}, "agent dials": {RoleAgent, RoleHost},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := net.Pipe()
			d, l := shake(t, opts(t, roles[0]), opts(t, roles[1]), a, b)
			if d.err != nil || l.err != nil {
				t.Fatal(d.err, l.err)
			}
			for i, got := range []Peer{l.s.Peer(), d.s.Peer()} {
				r := string(roles[i])
				if got.Identity != "id-"+r || got.Name != "name-"+r || got.Version != "1.2.3" || got.Proof != "token" || got.Address == "" {
					t.Errorf("peer %+v", got)
				}
			}
		})
	}
}

func TestHandshakeByUser(t *testing.T) {
	for name, tt := range map[string]struct {
		token Token
		proof string
	}{"user alone": {Token{}, "uid "}, "user and token": {token(t, secret), ", token"}} {
		t.Run(name, func(t *testing.T) {
			agent, host := sessions(t, func(a, h *Options) { a.Token, h.Token = tt.token, tt.token })
			for _, s := range []Session{agent, host} {
				if !strings.Contains(s.Peer().Proof, tt.proof) {
					t.Errorf("proof %q", s.Peer().Proof)
				}
			}
		})
	}
}

// A token that is replaced on both sides is used for the next session, and one that
// is replaced on one side alone is refused until the other follows.
func TestTokenRotation(t *testing.T) {
	tokens := map[Role]Token{}
	var mu sync.Mutex
	set := func(r Role, s string) { mu.Lock(); defer mu.Unlock(); tokens[r] = token(t, s) }
	load := func(r Role) func() (Token, error) {
		return func() (Token, error) { mu.Lock(); defer mu.Unlock(); return tokens[r], nil }
	}
	set(RoleAgent, secret)
	set(RoleHost, secret)
	e := unixEndpoint(t)
	ao, ho := opts(t, RoleAgent), opts(t, RoleHost)
	ao.LoadToken, ho.LoadToken = load(RoleAgent), load(RoleHost)
	l, err := Listen(ctx10(t), e, ao)
	if err != nil {
		t.Fatal(err)
	}
	closed(t, l)
	d, err := NewDialer(e, ho)
	if err != nil {
		t.Fatal(err)
	}
	dial := func() error {
		t.Helper()
		go func() {
			if s, err := l.Accept(ctx10(t)); err == nil {
				_ = s.Close()
			}
		}()
		s, err := d.Dial(ctx10(t))
		if err == nil {
			<-s.Done()
			_ = s.Close()
		}
		return err
	}
	if err := dial(); err != nil {
		t.Error(err)
	}
	set(RoleAgent, strings.Repeat("n", 32))
	var r *RefusedError
	if err := dial(); !errors.As(err, &r) || r.Code != RefusedProof {
		t.Errorf("with the old token: %v", err)
	}
	set(RoleHost, strings.Repeat("n", 32))
	if err := dial(); err != nil {
		t.Errorf("with the new token: %v", err)
	}
}

func TestIncompatiblePeers(t *testing.T) {
	tests := map[string]struct {
		edit           func(dial, accept *Options)
		dialled        Refusal
		dialledRemote  bool
		accepted       Refusal
		acceptedRemote bool
		says           []string
	}{
		"wrong token": {
			edit:    func(d, _ *Options) { d.Token = token(t, "another"+secret) },
			dialled: RefusedProof, dialledRemote: true, accepted: RefusedProof, says: []string{"tokens of agent and host differ"},
		},
		"dialler without token": {
			edit:    func(d, _ *Options) { d.Token = Token{} },
			dialled: RefusedToken, accepted: RefusedToken, says: []string{"agent has a token, the host has none"},
		},
		"acceptor without token": {
			edit:    func(_, a *Options) { a.Token = Token{} },
			dialled: RefusedToken, accepted: RefusedToken, says: []string{"host has a token, the agent has none"},
		},
		"same role": {
			edit:    func(d, _ *Options) { d.Role = RoleAgent },
			dialled: RefusedRole, accepted: RefusedRole, says: []string{"agent"},
		},
		"same network namespace": {
			edit:    func(d, a *Options) { d.Network, a.Network = "n", "n" },
			dialled: RefusedNetwork, accepted: RefusedNetwork, says: []string{"agent and host share one network namespace"},
		},
		"too new": {
			edit:    func(d, _ *Options) { d.version = wire.Version + 1 },
			dialled: RefusedVersion, accepted: RefusedVersion, says: []string{"link protocol", fmt.Sprint(" ", wire.Version+1), fmt.Sprint(" ", wire.Version), "update the older one"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d, a := opts(t, RoleHost), opts(t, RoleAgent)
			tt.edit(&d, &a)
			x, y := sockets(t)
			dialled, accepted := shake(t, d, a, x, y)
			dr, ar := refusal(t, dialled.err), refusal(t, accepted.err)
			if dr.Code != tt.dialled || dr.Remote != tt.dialledRemote {
				t.Errorf("dialler: %v", dr)
			}
			if ar.Code != tt.accepted || ar.Remote != tt.acceptedRemote {
				t.Errorf("acceptor: %v", ar)
			}
			for _, s := range tt.says {
				if !strings.Contains(dr.Error(), s) || !strings.Contains(ar.Error(), s) {
					t.Errorf("%q is not said by both:\n%v\n%v", s, dr, ar)
				}
			}
		})
	}
}

// Other systems send no network namespace.
func TestUnknownNetworkIsAccepted(t *testing.T) {
	for _, c := range [][2]string{{"", ""}, {"a", ""}, {"", "a"}, {"a", "b"}} {
		sessions(t, func(a, h *Options) { a.Network, h.Network = c[0], c[1] })
	}
}

func TestNetworkID(t *testing.T) {
	id := NetworkID()
	if id != NetworkID() {
		t.Error("it changes")
	}
	if runtime.GOOS == "linux" && len(id) != 32 {
		t.Errorf("%q", id)
	}
}

func TestPeerWithoutCredentials(t *testing.T) {
	d, a := opts(t, RoleHost), opts(t, RoleAgent)
	d.Token, a.Token = Token{}, Token{}
	x, y := net.Pipe()
	dialled, accepted := shake(t, d, a, x, y)
	if r := refusal(t, dialled.err); r.Code != RefusedToken {
		t.Error(r)
	}
	if r := refusal(t, accepted.err); r.Code != RefusedToken {
		t.Error(r)
	}
}

// raw is a peer that sends anything.
type raw struct {
	t *testing.T
	net.Conn
}

func (r raw) send(h wire.Handshake, magic string) {
	frame, _, err := wire.EncodeHandshake(h)
	if err != nil {
		r.t.Error(err)
	}
	_, _ = r.Write(append([]byte(magic), frame...)) // the other end may be closed
}

// hello reads what the other end opens with.
func (r raw) hello() (wire.Handshake, []byte) {
	var magic [len(wire.Magic)]byte
	if _, err := io.ReadFull(r, magic[:]); err != nil {
		r.t.Error(err)
	}
	return r.next()
}

func (r raw) next() (wire.Handshake, []byte) {
	h, body, err := wire.ReadHandshake(r)
	if err != nil {
		r.t.Error(err)
	}
	return h, body
}

func peerHello(r Role, nonce byte) wire.Handshake {
	return wire.Handshake{Hello: &wire.Hello{
		Version: wire.Version, Role: r, Identity: "evil",
		Nonce: bytes.Repeat([]byte{nonce}, wire.NonceSize), Token: true,
	}}
}

// against runs one end against a raw peer that is closed when it has spoken,
// unless it waits for the end itself.
func against(t *testing.T, o Options, d direction, peer func(r raw)) error {
	t.Helper()
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		peer(raw{t, theirs})
		_ = theirs.Close()
	}()
	s, err := overConn(ctx10(t), ours, o, d)
	if err == nil {
		_ = s.Close()
		t.Error("a session was made")
	}
	<-done
	return err
}

func TestHostilePeers(t *testing.T) {
	oversized := binary.BigEndian.AppendUint32([]byte(wire.Magic), wire.MaxHelloFrame+1)
	tests := map[string]struct {
		peer func(r raw)
		want Refusal
	}{
		"http":            {func(r raw) { _, _ = io.WriteString(r, "GET / HTTP/1.1\r\n\r\n") }, RefusedMagic},
		"short garbage":   {func(r raw) { _, _ = io.WriteString(r, "SSH") }, RefusedMagic},
		"leaves at once":  {func(raw) {}, RefusedLost},
		"leaves in magic": {func(r raw) { _, _ = io.WriteString(r, wire.Magic[:3]) }, RefusedLost},
		"leaves in frame": {func(r raw) { _, _ = io.WriteString(r, wire.Magic+"\x00\x00") }, RefusedLost},
		"oversized":       {func(r raw) { _, _ = r.Write(oversized) }, RefusedMalformed},
		"not JSON":        {func(r raw) { _, _ = io.WriteString(r, wire.Magic+"\x00\x00\x00\x03abc") }, RefusedMalformed},
		"unknown message": {func(r raw) { _, _ = io.WriteString(r, wire.Magic+"\x00\x00\x00\x0a{\"open\":{}}") }, RefusedMalformed},
		"proof for hello": {func(r raw) { r.send(wire.Handshake{Proof: &wire.Proof{MAC: make([]byte, 32)}}, wire.Magic) }, RefusedMalformed},
		"refuses unheard": {func(r raw) {
			r.send(wire.Handshake{Refusal: &wire.Refusal{Code: "uid", Reason: "no\nway"}}, wire.Magic)
		}, RefusedUID},
		"unknown refusal":  {func(r raw) { r.send(wire.Handshake{Refusal: &wire.Refusal{Code: "mood"}}, wire.Magic) }, RefusedOther},
		"zero proof":       {proveWith(func(wire.Handshake) wire.Handshake { return wire.Handshake{Proof: &wire.Proof{MAC: make([]byte, 32)}} }), RefusedProof},
		"short proof":      {proveWith(func(wire.Handshake) wire.Handshake { return wire.Handshake{Proof: &wire.Proof{MAC: make([]byte, 4)}} }), RefusedMalformed},
		"absent proof":     {proveWith(func(h wire.Handshake) wire.Handshake { return h }), RefusedProof},
		"leaves for proof": {func(r raw) { r.send(peerHello(RoleHost, 1), wire.Magic); r.hello() }, RefusedLost},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := against(t, opts(t, RoleAgent), acceptor, tt.peer)
			r := refusal(t, err)
			if r.Code != tt.want {
				t.Errorf("got %v, want %s", r, tt.want)
			}
			if strings.ContainsAny(r.Error(), "\n\r") {
				t.Errorf("%q is more than a line", r.Error())
			}
		})
	}
}

// proveWith is a dialler that answers the demand for proof with what answer returns.
func proveWith(answer func(hello wire.Handshake) wire.Handshake) func(r raw) {
	return func(r raw) {
		h := peerHello(RoleHost, 1)
		r.send(h, wire.Magic)
		r.hello()
		r.send(answer(h), "")
		_, _ = io.Copy(io.Discard, r) // the refusal
	}
}

// A peer without the token sends back what it receives.
func TestReflection(t *testing.T) {
	t.Run("everything", func(t *testing.T) {
		err := against(t, opts(t, RoleHost), dialler, func(r raw) {
			h, _ := r.hello()
			r.send(h, wire.Magic)
		})
		if r := refusal(t, err); r.Code != RefusedRole {
			t.Error(r)
		}
	})
	t.Run("all but the role", func(t *testing.T) {
		err := against(t, opts(t, RoleHost), dialler, func(r raw) {
			h, _ := r.hello()
			h.Hello.Role = RoleAgent
			r.send(h, wire.Magic)
		})
		if r := refusal(t, err); r.Code != RefusedProof {
			t.Error(r)
		}
	})
	t.Run("the proof", func(t *testing.T) {
		err := against(t, opts(t, RoleHost), dialler, func(r raw) {
			r.hello()
			r.send(peerHello(RoleAgent, 1), wire.Magic)
			p, _ := r.next()
			r.send(p, "")
		})
		if r := refusal(t, err); r.Code != RefusedProof || r.Remote {
			t.Error(r)
		}
	})
	// Two connections at once to one process: what the one proves as dialler is
	// offered to the other as acceptor.
	t.Run("across connections", func(t *testing.T) {
		var proof wire.Handshake
		_ = against(t, opts(t, RoleHost), dialler, func(r raw) {
			r.hello()
			r.send(peerHello(RoleAgent, 1), wire.Magic)
			proof, _ = r.next()
		})
		err := against(t, opts(t, RoleAgent), acceptor, proveWith(func(wire.Handshake) wire.Handshake { return proof }))
		if r := refusal(t, err); r.Code != RefusedProof {
			t.Error(r)
		}
	})
}

// tee records what a peer wrote.
type tee struct {
	net.Conn
	wrote bytes.Buffer
}

func (c *tee) Write(b []byte) (int, error) { c.wrote.Write(b); return c.Conn.Write(b) }

// A recorded handshake is refused the second time.
func TestReplay(t *testing.T) {
	a, b := net.Pipe()
	rec := &tee{Conn: a}
	d, l := shake(t, opts(t, RoleHost), opts(t, RoleAgent), rec, b)
	if d.err != nil || l.err != nil {
		t.Fatal(d.err, l.err)
	}
	_ = d.s.Close()
	err := against(t, opts(t, RoleAgent), acceptor, func(r raw) {
		go func() { _, _ = r.Write(rec.wrote.Bytes()) }()
		_, _ = io.Copy(io.Discard, r)
	})
	if r := refusal(t, err); r.Code != RefusedProof {
		t.Error(r)
	}
}

func TestSilentAndSlowPeers(t *testing.T) {
	for name, peer := range map[string]func(net.Conn){
		"silent": func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
		"byte by byte": func(c net.Conn) {
			for _, b := range append([]byte(wire.Magic), 0, 0, 1, 0, '{') {
				if _, err := c.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(time.Second)
			}
		},
		"does not read": func(c net.Conn) {
			raw{t, c}.send(peerHello(RoleHost, 1), wire.Magic)
			time.Sleep(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ours, theirs := net.Pipe()
				go func() { peer(theirs); _ = theirs.Close() }()
				begin := time.Now()
				o := opts(t, RoleAgent)
				o.HandshakeTimeout = 0 // as it is by itself
				_, err := Server(t.Context(), ours, o)
				if r := refusal(t, err); r.Code != RefusedTimeout {
					t.Error(r)
				}
				if d := time.Since(begin); d != 5*time.Second {
					t.Errorf("took %s", d)
				}
				time.Sleep(2 * time.Minute)
			})
		})
	}
}

func TestHandshakeEndsWithContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		if _, err := Server(ctx, ours, opts(t, RoleAgent)); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		_ = theirs.Close()
	})
}

func TestOptions(t *testing.T) {
	for name, edit := range map[string]func(*Options){
		"role":      func(o *Options) { o.Role = "king" },
		"identity":  func(o *Options) { o.Identity = "" },
		"name":      func(o *Options) { o.Name = strings.Repeat("n", 257) },
		"version":   func(o *Options) { o.Version = strings.Repeat("n", 65) },
		"negative":  func(o *Options) { o.MaxStreams = -1 },
		"keepalive": func(o *Options) { o.KeepAlive = time.Millisecond },
		"logger":    func(o *Options) { o.Logger = nil },
	} {
		o := opts(t, RoleAgent)
		edit(&o)
		a, b := net.Pipe()
		if _, err := Client(ctx10(t), a, o); err == nil || !strings.Contains(err.Error(), "link options") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := b.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("%s: connection left open: %v", name, err)
		}
	}
	o := opts(t, RoleAgent)
	o.Token = Token{}
	e := Endpoint{Network: NetworkVsock, CID: CIDHost, Port: 1000}
	if _, err := Dial(ctx10(t), e, o); err == nil || !strings.Contains(err.Error(), "vsock needs a token") {
		t.Error(err)
	}
	if _, err := Listen(ctx10(t), e, o); err == nil || !strings.Contains(err.Error(), "vsock needs a token") {
		t.Error(err)
	}
	if _, err := Listen(ctx10(t), Endpoint{}, o); err == nil {
		t.Error("zero endpoint accepted")
	}
	if a, b := NewIdentity(), NewIdentity(); a == b || len(a) > port.MaxWord {
		t.Errorf("identities %q, %q", a, b)
	}
}
