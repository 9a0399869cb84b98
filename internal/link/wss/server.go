// SPDX-License-Identifier: Apache-2.0

package wss

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/time/rate"

	"github.com/fairlead/fairlead/internal/link"
	"github.com/fairlead/fairlead/internal/link/own"
)

const (
	headerTime   = 10 * time.Second // for TLS, and for a request
	maxUnproved  = 256              // connections that have not proved themselves
	refusalPause = time.Second      // between log lines about refused peers
)

// ServerOptions configure a Server. Link, Guests, CertFile and KeyFile are required.
type ServerOptions struct {
	// Link are the options of all links, without a token.
	Link link.Options
	// Guests are the names of the guests that may connect.
	Guests []string
	// Token returns the token of a guest, for each handshake; nil if guests have none.
	Token func(guest string) (link.Token, error)
	// CertFile and KeyFile hold the certificate with its chain, and its key, in PEM.
	// They are read again when they change.
	CertFile, KeyFile string
	// BundleFile holds the certificates that agents pin; empty means those of CertFile.
	BundleFile string
	// ClientCAFile, if not empty, holds the roots of the guests' certificates, one of
	// which each guest must then have: with its name as common name or DNS name.
	ClientCAFile string

	maxUnproved int // the constant if 0
}

// Server takes the links of guests that dial.
type Server struct {
	o       ServerOptions
	log     *slog.Logger
	bundle  []byte
	certs   *keyPair
	clients *x509.CertPool // nil if guests need no certificate
	places  map[string]*place
	quiet   rate.Sometimes // for the log, of peers without the name of a guest
	limit   int
	scarce  func(conn any, use own.Use) bool

	mu       sync.Mutex
	ended    bool
	unproved []net.Conn // all that are open and have not proved themselves, oldest first
	links    sync.WaitGroup
}

// NewServer reads the files and returns a server. It starts nothing.
func NewServer(o ServerOptions) (*Server, error) {
	s := &Server{
		o: o, log: o.Link.Logger, certs: &keyPair{cert: o.CertFile, key: o.KeyFile, log: o.Link.Logger}, places: make(map[string]*place),
		quiet: rate.Sometimes{Interval: refusalPause}, limit: cmp.Or(o.maxUnproved, maxUnproved),
		scarce: own.Scarce,
	}
	if n := own.Descriptors(); n > 0 {
		s.limit = int(max(1, min(uint64(s.limit), n/4)))
	}
	for _, name := range o.Guests {
		s.places[name] = newPlace()
	}
	if _, err := s.certs.get(nil); err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	file := o.BundleFile
	if file == "" {
		file = o.CertFile
	}
	list, err := readCertificates(file)
	if err != nil {
		return nil, fmt.Errorf("CA bundle: %w", err)
	}
	s.bundle = bundleOf(list)
	if o.ClientCAFile != "" {
		list, err := readCertificates(o.ClientCAFile)
		if err != nil {
			return nil, fmt.Errorf("roots of the guests' certificates: %w", err)
		}
		s.clients = poolOf(list)
	}
	return s, nil
}

func readCertificates(file string) ([]*x509.Certificate, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	list, err := certificates(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return list, nil
}

// Pin returns that of the bundle.
func (s *Server) Pin() Pin { return PinOf(s.bundle) }

// Session waits for the next session of a guest.
func (s *Server) Session(ctx context.Context, guest string) (link.Session, error) {
	return s.places[guest].take(ctx)
}

// Serve takes connections of ln until ctx ends, and closes it. Sessions that nobody
// took are closed. It may be called once.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+pathBundle, s.serveBundle)
	mux.HandleFunc("GET "+pathLink+"{name}", func(w http.ResponseWriter, r *http.Request) {
		if s.begin() {
			defer s.links.Done()
			s.serveLink(ctx, w, r)
		}
	})
	var protocols http.Protocols
	protocols.SetHTTP1(true) // alone: a connection is one request, which the limits count
	srv := &http.Server{
		Handler: mux, Protocols: &protocols, TLSConfig: s.tlsConfig(),
		ReadHeaderTimeout: headerTime, ReadTimeout: 2 * headerTime, WriteTimeout: 2 * headerTime, MaxHeaderBytes: maxHeaders,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState:   s.changed,
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	srv.SetKeepAlivesEnabled(false)
	closing := func() {
		s.closeConns()
		_ = srv.Close()
	}
	stop := context.AfterFunc(ctx, closing)
	defer stop()
	err := srv.ServeTLS(ln, "", "")
	closing()
	for _, p := range s.places { // a link under way may wait for one
		p.close()
	}
	s.end()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("serve links at %s: %w", ln.Addr(), err)
}

// begin admits a request for a link, which must be reported to links.Done.
func (s *Server) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.links.Add(1)
	}
	return !s.ended
}

// end lets no more requests begin, and waits for those under way.
func (s *Server) end() {
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.links.Wait()
}

func (s *Server) tlsConfig() *tls.Config {
	c := &tls.Config{MinVersion: tls.VersionTLS13, GetCertificate: s.certs.get, NextProtos: []string{"http/1.1"}, DynamicRecordSizingDisabled: true}
	if s.clients != nil {
		// The bundle is for everybody: who wants a link needs a certificate.
		c.ClientCAs, c.ClientAuth = s.clients, tls.VerifyClientCertIfGiven
	}
	return c
}

type connKey struct{}

// changed is for http.Server.ConnState. Beyond the limit of connections that have not
// proved themselves, the oldest is closed for the newest.
func (s *Server) changed(c net.Conn, now http.ConnState) {
	switch now {
	case http.StateNew:
		if s.scarce(netConn(c), own.ForLink) {
			_ = closeNow(c)
			s.quiet.Do(func() { s.log.Warn("cannot accept connections", "err", own.ErrDescriptors) })
			return
		}
		if old := s.enter(c); old != nil {
			_ = closeNow(old)
		}
	case http.StateClosed:
		s.leave(c)
	case http.StateActive, http.StateIdle, http.StateHijacked: // still unproved
	}
}

// enter adds a connection, and returns the one to close for it, nil if there is none.
func (s *Server) enter(c net.Conn) (old net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return c
	}
	if len(s.unproved) >= s.limit {
		old = s.unproved[0]
		s.unproved = slices.Delete(s.unproved, 0, 1)
	}
	s.unproved = append(s.unproved, c)
	return old
}

// closeConns closes all connections that have not proved themselves, and those that come.
func (s *Server) closeConns() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for _, c := range s.unproved {
		_ = closeNow(c)
	}
}

func (s *Server) leave(c net.Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.unproved, c); i >= 0 {
		s.unproved = slices.Delete(s.unproved, i, i+1)
	}
}

func (s *Server) serveBundle(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/x-pem-file")
	_, _ = w.Write(s.bundle)
}

// serveLink makes a session of a request and hands it to the guest's place.
func (s *Server) serveLink(ctx context.Context, w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	p, proof, err := s.admit(name, r)
	if err != nil {
		s.refused(r, name, err)
		http.Error(w, err.Error(), http.StatusForbidden)
		return
	}
	tcp, _ := r.Context().Value(connKey{}).(net.Conn)
	corked := &corkResponse{ResponseWriter: w}
	session, err := s.session(ctx, corked, r, name, proof)
	if corked.hijacked { // else its end is reported to changed
		s.leave(tcp)
	}
	if err != nil {
		s.refused(r, name, err)
		return
	}
	if err := p.offer(session); err != nil {
		s.refused(r, name, err)
	}
}

// admit checks what is known before the link's own handshake.
func (s *Server) admit(name string, r *http.Request) (_ *place, proof string, err error) {
	p := s.places[name]
	if p == nil {
		return nil, "", fmt.Errorf("no guest of the name %q: add it with --guest", name)
	}
	if s.clients == nil {
		return p, "", nil
	}
	if len(r.TLS.VerifiedChains) == 0 {
		return nil, "", errors.New("a certificate of the guest is required")
	}
	leaf := r.TLS.VerifiedChains[0][0]
	if leaf.Subject.CommonName != name && !slices.Contains(leaf.DNSNames, name) {
		return nil, "", fmt.Errorf("the certificate is not of the guest %q", name)
	}
	return p, "certificate " + name, nil
}

func (s *Server) session(ctx context.Context, corked *corkResponse, r *http.Request, name, proof string) (link.Session, error) {
	remote, err := net.ResolveTCPAddr("tcp", r.RemoteAddr)
	if err != nil {
		return nil, err
	}
	ws, err := websocket.Accept(corked, r, &websocket.AcceptOptions{Subprotocols: []string{protocol}, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		return nil, err
	}
	c, err := newConn(ws, corked.cork, remote, r.TLS, proof)
	if err != nil {
		return nil, errors.Join(err, ws.CloseNow())
	}
	o := s.o.Link
	if s.o.Token != nil {
		o.LoadToken = func() (link.Token, error) { return s.o.Token(name) }
	}
	return link.Server(ctx, c, o)
}

// Refused is a peer that was refused.
type Refused struct {
	At   time.Time
	Peer string // its address
	Err  error
}

// LastRefused returns the last peer that came with the name of a guest and was refused, zero
// if there was none. Peers that left by themselves do not count.
func (s *Server) LastRefused(guest string) Refused {
	p := s.places[guest]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refused
}

// refused keeps and logs a refused peer: at most once a second for each guest, and for all
// unknown names, as anybody can cause this.
func (s *Server) refused(r *http.Request, name string, err error) {
	quiet := &s.quiet
	if p := s.places[name]; p != nil {
		quiet = &p.quiet
		p.noteRefused(Refused{At: time.Now(), Peer: r.RemoteAddr, Err: err})
	}
	quiet.Do(func() {
		s.log.Warn("peer refused", "peer", r.RemoteAddr, "guest", name, "err", err)
	})
}
